"""JSON in the one form that checksums are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def plain_bytes(value: Any) -> bytes:
    """``value`` as JSON with sorted names, without spaces, in ASCII.

    The same before it is written to a file and after it is read.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of_json(values: Mapping[str, Any], but: str) -> str:
    """SHA-256 of ``values`` without the one named ``but``, however a file lays them out."""
    return hashlib.sha256(
        plain_bytes({name: value for name, value in values.items() if name != but})
    ).hexdigest()
