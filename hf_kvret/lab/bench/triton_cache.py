"""Triton's cache as a folder that travels: what is compiled into it, its place, and its key.

``hf-kvret bench machine-code --cache FOLDER`` fills it without a GPU. A machine with a GPU, and the
same checkout, Python and triton, sets TRITON_CACHE_DIR to it and calls ``rewrite_groups``: then it
compiles nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

KEY_FILE = "key.json"
"""In the folder: ``triton_key_facts`` of the machine that filled it."""

CachedStep = tuple[str, int, int]
"""A cache with its options, tokens before the first step, and sequences."""

_PARIS, _LRQK, _FLAT = "paris:top_k=100", "lrqk:top_k=2048", "flat:top_k=1024"
_SPLIT = "split:device_budget=32MB"
CACHED_STEPS: tuple[CachedStep, ...] = (
    *((cache, 32_768, 1) for cache in (_PARIS, "paris:top_k=1024", _LRQK, _FLAT)),
    *((cache, 131_072, 1) for cache in (_PARIS, "paris:top_k=1024", _LRQK, _FLAT)),
    *((cache, 65_536, 8) for cache in (_PARIS, "paris:top_k=1024")),
    *((f"{_PARIS}:store={store}", 65_536, 1) for store in ("host", "resident", "higgs", _SPLIT)),
    *((f"{cache}:store=resident", 65_536, 1) for cache in (_LRQK, _FLAT)),
    *((f"{cache}:top_k=1024", 65_536, 1) for cache in ("lrqk", "a2ats")),
    *((f"ctkvr:top_k=1024:store={store}", 32_768, 1) for store in ("device", "resident")),
    *((cache, 65_536, 1) for cache in ("flat:top_k=2048", "aqua", f"{_PARIS}:prompt=retrieve")),
    (f"{_PARIS}:prefill_chunk=8192", 65_536, 1),
)
"""Where a cache says how prompts are read, it reads one; others are filled with random rows."""


def rewrite_groups(folder: Path) -> int:
    """Let the groups of files in a cache lie where ``folder`` is now; returns how many there are.

    Triton names the files of a kernel by absolute paths, and looks for them there alone.
    """
    groups = sorted(folder.resolve().glob("*/__grp__*.json"))
    for group in groups:
        names = json.loads(group.read_text())["child_paths"]
        paths = {name: str(group.with_name(Path(path).name)) for name, path in names.items()}
        group.write_text(json.dumps({"child_paths": paths}))
    return len(groups)


def triton_key_facts() -> dict[str, str]:
    """What must be the same where a cache is filled and used: versions, and a hash of Triton."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime.cache import triton_key

    digest = hashlib.sha256(triton_key().encode()).hexdigest()[:16]
    ptxas = get_ptxas_version(90).strip().splitlines()[-1]
    return {"triton": triton.__version__, "key": digest, "ptxas": ptxas}
