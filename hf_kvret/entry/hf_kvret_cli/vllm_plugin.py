"""The entry point of vLLM's plugins, which imports nothing unless it is asked for.

vLLM logs what a plugin's import raises, and goes on without it; what a plugin's function raises
ends vLLM. So a broken installation ends it too, and does not read every row.
"""

from __future__ import annotations

import os

VARIABLE = "HF_KVRET_VLLM"
"""Names the method and its options; unset: vLLM stays as it is."""


def register() -> None:
    """Have vLLM's decode steps select if ``HF_KVRET_VLLM`` says so; see ``hf_kvret.vllm``."""
    if os.environ.get(VARIABLE):
        from hf_kvret.vllm import register as register_backends

        register_backends()
