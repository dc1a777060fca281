"""The studies' modules by plain names, as their scripts import them; a tiny model and text."""

import sys

from ...lab.conftest import tiny_model_dir, tiny_text
from ..conftest import ROOT

__all__ = ["tiny_model_dir", "tiny_text"]

sys.path.insert(0, str(ROOT / "examples" / "studies"))
