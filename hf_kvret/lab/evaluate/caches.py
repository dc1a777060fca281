"""Caches by name: ours, transformers' own, and kvpress presses, all used in the same way.

A name may carry options (``hf_kvret.options.spec``): ``paris:top_k=100:store=host``,
``paris:preset=paper``, ``quantized:backend=quanto:nbits=2``,
``kvpress:SnapKV:compression_ratio=0.5``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import Cache

from hf_kvret.artifacts.shared import ArtifactConfig
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.options.spec import parse_option, parse_spec
from hf_kvret.registry import registered_methods

OPPONENTS = ("full", "static", "offloaded", "quantized", "kvpress")


def _nothing(model: PreTrainedModel) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class CacheChoice:
    """One column of a table: how to make a cache, and what surrounds its prefill.

    Attributes:
        name: as given, options included.
        make: ``make(config, capacity)`` returns an empty cache; ``capacity`` is the most tokens
            that it will hold, which only preallocating caches use.
        around_prefill: a context manager that is active while the context is read; kvpress
            compresses in there.
        on_host: rows live in host memory whatever device their tensors name.
        options: of a retrieval cache.
    """

    name: str
    make: Callable[[PreTrainedConfig, int], Cache]
    around_prefill: Callable[[PreTrainedModel], AbstractContextManager[Any]] = _nothing
    on_host: bool = False
    options: RetrievalConfig | None = None

    @property
    def method(self) -> str:
        """The name without options."""
        return self.name.partition(":")[0].strip()

    @property
    def lacks_artifact(self) -> bool:
        """Whether an artifact is needed and not named; the model's folder may have it."""
        return self.options is not None and self.options.lacks_artifact


def known_caches() -> list[str]:
    """Every name that ``choose_cache`` takes, options left out."""
    return [*OPPONENTS, *registered_methods()]


def choose_cache(
    text: str, defaults: dict[str, Any] | None = None, device: str = "cpu"
) -> CacheChoice:
    """The cache that ``text`` names.

    Args:
        text: a name of ``known_caches()`` and its options, see above.
        defaults: of retrieval caches where ``text`` and its preset say nothing, as ``top_k`` or
            ``store``.
        device: where the model is; offloading needs a CUDA device.

    Raises:
        ValueError: an unknown name, option or value, or a cache that can't work here.
        ModuleNotFoundError: the package behind an opponent is missing; says which.
    """
    if text.partition(":")[0].strip() == "kvpress":
        return _press(text)
    name, options = parse_spec(text)
    if name in registered_methods():
        cache_class = registered_methods()[name]
        config = cache_class.Config
        # A default for all caches may be no option of this one, or a value that it can't have.
        usual = {key: value for key, value in (defaults or {}).items() if config.takes(key, value)}
        chosen = config.from_options(**usual | config.written_out(options))
        return CacheChoice(
            text,
            lambda config, capacity: cache_class(config=config, options=chosen),
            options=chosen,
        )
    if name == "quantized":
        return _quantized(text, options)
    if name not in OPPONENTS:
        raise ValueError(f"unknown cache {name!r}: choose among {', '.join(known_caches())}")
    if options:
        raise ValueError(f"{text!r}: {name} takes no options, got {', '.join(options)}")
    if name == "full":
        return CacheChoice(text, lambda config, capacity: DynamicCache(config=config))
    if name == "static":
        return CacheChoice(text, lambda config, capacity: StaticCache(config, capacity))
    if torch.device(device).type != "cuda":
        raise ValueError(
            "offloaded: transformers offloads from a CUDA device only, and the model is on "
            f"{device!r}: leave it out here"
        )
    return CacheChoice(
        text, lambda config, capacity: DynamicCache(config=config, offloading=True), on_host=True
    )


def choose_caches(
    texts: list[str], choose: Callable[[str], CacheChoice] = choose_cache
) -> dict[str, CacheChoice]:
    """``choose`` for each of ``texts``; ValueError for none or for the same one twice."""
    if not texts:
        raise ValueError(f"no cache named: choose among {', '.join(known_caches())}")
    if len(set(texts)) < len(texts):
        raise ValueError(f"the same cache twice in {', '.join(texts)}: name each once")
    return {text: choose(text) for text in texts}


def artifact_sha256(choice: CacheChoice, config: PreTrainedConfig) -> str | None:
    """The digest of the artifact that a cache works with; None for none.

    Raises:
        OSError, ValueError: it needs one, and there is none.
    """
    if not isinstance(choice.options, ArtifactConfig):
        return None
    # A cache knows where the artifact is, and where another model's would be refused.
    options: Any = choice.make(config, 1).options
    return None if options.artifact is None else options.load().sha256


def _quantized(text: str, options: dict[str, Any]) -> CacheChoice:
    options = {"backend": "quanto", **options}
    if options["backend"] == "hqq":
        # Its own default, axis 0, rounds old rows again whenever new ones join them.
        options = {"axis_key": 1, "axis_value": 1, **options}
    return CacheChoice(text, lambda config, capacity: QuantizedCache(config=config, **options))


def _press(text: str) -> CacheChoice:
    try:
        import kvpress
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{text!r} needs kvpress, which alone would bring an older transformers: pip install "
            "--no-deps kvpress, and what docs/evaluation.md lists beside it"
        ) from error

    words = [word.strip() for word in text.split(":")[1:]]
    presses = sorted(
        name.removesuffix("Press")
        for name in dir(kvpress)
        if name.endswith("Press") and issubclass(getattr(kvpress, name), kvpress.ScorerPress)
    )
    if not words or words[0] not in presses:
        raise ValueError(
            f"{text!r}: write kvpress:NAME, as kvpress:SnapKV:compression_ratio=0.5, with NAME "
            f"one of {', '.join(presses)}"
        )
    options = dict(parse_option(text, word) for word in words[1:])
    try:
        press = getattr(kvpress, f"{words[0]}Press")(**options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from error
    return CacheChoice(text, lambda config, capacity: DynamicCache(config=config), press)
