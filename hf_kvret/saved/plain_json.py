"""JSON in the one form that checksums are made of."""

from __future__ import annotations

import json
from typing import Any


def plain_bytes(value: Any) -> bytes:
    """``value`` as JSON with sorted names, without spaces, in ASCII.

    The same before it is written to a file and after it is read.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
