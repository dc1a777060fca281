"""``python -m hf_kvret``: the program ``hf-kvret``."""

import sys

from hf_kvret.cli import main

if __name__ == "__main__":
    sys.exit(main())
