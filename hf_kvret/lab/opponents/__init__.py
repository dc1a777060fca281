"""Factories of caches that others have on PyPI, with the calls and settings of their own pages.

None of these packages is a dependency, and some have modules of the same name, so each is installed
into a folder of its own. See ``docs/eval/arena.md``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import DynamicCache, PreTrainedModel


def _load(package: str, module: str) -> Any:
    """A module of a package; an error says which line installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there may lack one of its own.
        if error.name not in (module, module.partition(".")[0]):
            raise
        raise ModuleNotFoundError(
            f"{error}: pip install --no-deps --target peers {package}, with PYTHONPATH=peers"
        ) from error


def turbokv(model: PreTrainedModel, bits: int = 4, **options: Any) -> Any:
    """Rotated keys and values as codes; the first layer stays as it is."""
    package = _load("turbokv==0.1.0", "turboquant")
    return package.TurboQuantCache(model.config, nbits=bits, device=str(model.device), **options)


def quantcore(model: PreTrainedModel, bits: int = 3, **options: Any) -> Any:
    """Keys as codes, and values with ``compress_values=true``."""
    package = _load("quantcore-ai==0.4.2", "turboquant.hf_integration")
    cache = package.make_turboquant_cache(model.config, bits=bits, verbose=False, **options)
    cache.reported_bytes = lambda: sum(one.memory_bytes()["compressed"] for one in cache.layers)
    return cache


def tiny_turboquant(model: PreTrainedModel, compression: str = "safe", **options: Any) -> Any:
    """Blocks of 128 rows as codes, the newest ones as they are."""
    package = _load("tiny-turboquant==0.18.0", "tiny_turboquant")
    cache = package.TinyKVCache.for_model(model, compression=compression, **options)
    cache.reported_bytes = lambda: cache.memory_report()["total_storage_bytes"]
    return cache


def kakeyalattice(model: PreTrainedModel, **options: Any) -> Any:
    """Rows that are rounded to a lattice and kept as floats."""
    package = _load("kakeyalattice==1.5.0", "kakeyalattice.hf")
    text = model.config.get_text_config(decoder=True)
    sizes = {"num_hidden_layers": text.num_hidden_layers, "head_dim": text.head_dim}
    return package.KakeyaLatticeCache(**sizes, device=model.device, **options)


def turboquant_torch(model: PreTrainedModel, **options: Any) -> Any:
    """Rows of the prompt, rounded in place at its end by ``compress_all``."""
    package = _load("turboquant-torch==0.4.0", "turboquant")

    def compress(cache: Any) -> None:
        megabytes = cache.compress_all()["compressed_mb"]
        cache.reported_bytes = lambda: 2**20 * megabytes

    return _behind_prompt(package.TurboQuantDynamicCache.from_model(model, **options), compress)


def nexusquant(model: PreTrainedModel, mode: str = "quant_only", **options: Any) -> Any:
    """Rows of the prompt, rounded in place at its end by ``compress_kv_cache``."""
    package = _load("nexusquant-kv==0.6.3", "nexusquant")
    text = model.config.get_text_config(decoder=True)
    known = {"head_dim": text.head_dim, "rope_base": text.rope_parameters["rope_theta"]}
    compress = partial(package.compress_kv_cache, mode=mode, **known, **options)
    return _behind_prompt(DynamicCache(config=model.config), compress)


@contextmanager
def _behind_prompt(cache: Any, work: Callable[[Any], Any]) -> Iterator[Any]:
    """A context that gives a cache, and works on it at the end of the prompt."""
    yield cache
    work(cache)
