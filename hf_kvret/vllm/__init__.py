"""vLLM with decode steps that read ``top_k`` rows of its own pages.

``HF_KVRET_VLLM=paris:top_k=512 vllm serve MODEL``; without that variable vLLM is as it was. See
docs/vllm.md.
"""

from __future__ import annotations

import os

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.config import RetrievalConfig, parse_spec
from hf_kvret.registry import registered_methods

__all__ = ["VARIABLE", "register", "selection_of"]

VARIABLE = "HF_KVRET_VLLM"
"""The name of an environment variable, which names the method and its options."""

_METHODS = ("flat", "paris")
# Options that say how to select. Others are of a cache of our own, which there is none of.
_OPTIONS = {
    *("top_k", "sink", "recent", "flush", "dense_below"),
    *("tables", "per_selected", "group_reduce", "seed"),
}
_BACKENDS = {
    "CPU_ATTN": "hf_kvret.vllm.cpu.SelectingBackend",
    "FLASH_ATTN": "hf_kvret.vllm.cuda.SelectingBackend",
    "FLASHINFER": "hf_kvret.vllm.cuda.SelectingBackend",
    "TRITON_ATTN": "hf_kvret.vllm.cuda.SelectingBackend",
}
# These serve pictures, models without attention, and whoever registered one of his own.
_NO_TEXT = ("TORCH_SDPA", "NO_ATTENTION", "CUSTOM")


def selection_of(text: str) -> tuple[type[RetrievalCache], RetrievalConfig]:
    """The method that ``text`` names, ``paris:top_k=512`` for instance, and its options.

    Codes of paris are those of keys as they are: a mean key would be that of one request. So would
    be the mean that stands for tokens which are not selected, so nothing does.

    Raises:
        ValueError: another method than flat and paris, an unknown option, or one that says nothing
            about a selection.
    """
    name, given = parse_spec(text)
    if name not in _METHODS:
        raise ValueError(
            f"{VARIABLE}={text!r}: decode steps of vLLM select by {' or '.join(_METHODS)}; take "
            "transformers for the other methods"
        )
    method = registered_methods()[name]
    options = method.Config.from_options(**given)
    for option in given:
        if option not in {*_OPTIONS, "center", "preset"}:
            raise ValueError(
                f"{VARIABLE}={text!r}: {option} is of a cache of our own, and rows are vLLM's: "
                f"leave it out; options of a selection are {', '.join(sorted(_OPTIONS))}"
            )
    if isinstance(options, ParisConfig):
        if options.center and "center" in given:
            raise ValueError(
                f"{VARIABLE}={text!r}: a mean key is that of one request, and blocks are shared: "
                "leave center out"
            )
        options = options.replace(center=False)
    return method, options.replace(rest=None)


def register() -> None:
    """Put our attention in place of vLLM's, as ``HF_KVRET_VLLM`` says.

    Raises:
        ValueError: as ``selection_of``.
    """
    selection_of(os.environ[VARIABLE])
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for backend in AttentionBackendEnum:
        if backend.name not in _NO_TEXT:
            path = _BACKENDS.get(backend.name, "hf_kvret.vllm.selecting.RefusedBackend")
            register_backend(backend, path)
