"""Caches by name: ours, transformers' own, presses and strangers, all used in the same way.

A name may carry options (``hf_kvret.options.config``): ``paris:top_k=100:store=host``,
``paris:preset=paper``, ``quantized:backend=quanto:nbits=2``,
``kvpress:SnapKV:compression_ratio=0.5``, ``mine=./mine.py:make:bits=4``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import (
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvret.artifacts.shared import ArtifactConfig
from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.failures import CheckFailed, out_of_memory
from hf_kvret.options.config import RetrievalConfig, parse_option, parse_spec
from hf_kvret.registry import registered_methods

# Changes by these modules stay: they change nothing by themselves.
_HARMLESS = ("transformers.utils.output_capturing", "kvpress.attention_patch")
# By the place of a factory and its file's digest, what changed as it was imported, which is once,
# and what rows changed whose factory imported more.
_import_faults: defaultdict[tuple[str, str], list[list[str]]] = defaultdict(lambda: [[]])
OPPONENTS = ("full", "static", "offloaded", "quantized", "kvpress")


@dataclass(frozen=True)
class CacheChoice:
    """One column of a table: how to make a cache.

    Attributes:
        name: as given, options included.
        make: ``make(config, capacity)`` returns an empty cache; ``capacity`` is the most tokens
            that it will hold, which only preallocating caches use.
        on_host: rows live in host memory whatever device their tensors name.
        options: of a retrieval cache.
        is_exact: logits are those of full attention, for ours with a budget for everything.
        needs_prompt: it acts on the prompt, so that random rows can't stand for one.
        factory: of a cache that is not exact and not ours, where its code is.
        faults: what it changed in a model for good, as ``forward``: it gets no more cells.
    """

    name: str
    make: Callable[[PreTrainedConfig, int], Cache]
    on_host: bool = False
    options: RetrievalConfig | None = None
    is_exact: bool = True
    needs_prompt: bool = False
    factory: str = ""
    faults: list[str] = field(default_factory=list, compare=False)

    @property
    def method(self) -> str:
        """The name without options."""
        return self.name.partition(":")[0].strip()

    @property
    def lacks_artifact(self) -> bool:
        """Whether an artifact is needed and not named; the model's folder may have it."""
        return self.options is not None and self.options.lacks_artifact

    @contextmanager
    def open(self, model: PreTrainedModel, capacity: int) -> Iterator[Cache]:
        """An empty cache of ``capacity`` tokens, in a context for the time of the prompt."""
        yield self.make(model.config, capacity)

    def check(self, model: PreTrainedModel) -> None:
        """ValueError where ``model`` can't have the cache; that of others is tried later."""
        cache = None if self.needs_prompt or self.factory else self.make(model.config, 1)
        if isinstance(cache, RetrievalCache):
            cache.check_model(model)

    @contextmanager
    def guard(self, model: PreTrainedModel) -> Iterator[None]:
        """For all that is done with the cache on ``model``.

        Whatever the code of others raises is a CheckFailed: it ends a cell, and the others go on.
        So is what they change in the model for good, which would be in all later cells.
        """
        try:
            with _unchanged(model, self.faults) if self.needs_prompt else nullcontext():
                yield
        except CheckFailed:
            raise
        except (Exception, SystemExit) as error:
            if self.is_exact or out_of_memory(error):
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())
            # With a StopIteration as its cause, contexts would raise that one.
            raise CheckFailed(f"{self.name} ({self.factory}) fails: {why}") from None


@contextmanager
def _unchanged(model: PreTrainedModel, changed: list[str]) -> Iterator[None]:
    """Undo and name changes of a model's functions, hooks, parts and caches; raise for any.

    Those of transformers' tables and of ``torch.nn.functional`` are a model's, too. So it is the
    next time: code may change what it finds where it is imported, thus only once.
    """
    modules = list(model.modules())
    classes = {cls for one in modules for cls in type(one).__mro__[:-1]}
    classes |= {cls for cls in vars(cache_utils).values() if isinstance(cls, type)}
    tables: Any = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    dicts = [x for one in tables for x in (one._global_mapping, one._local_mapping)]
    code = {*classes, *(function for one in tables for function in one.values())}
    imported = {one.__module__ for one in code} | {"torch.nn.functional"}
    dicts += [vars(sys.modules[name]) for name in imported & sys.modules.keys()]
    configs = (getattr(one, "config", None) for one in modules)
    dicts += [vars(config) for config in configs if isinstance(config, PreTrainedConfig)]
    for one in modules:
        dicts += vars(one), one._modules, one._forward_pre_hooks, one._forward_hooks
    places: list[Any] = [(one, one.__setitem__, one.__delitem__) for one in dicts]
    places += [(vars(cls), partial(setattr, cls), partial(delattr, cls)) for cls in classes]
    inherited = {name for cls in classes for name in vars(cls)}.union(*tables)
    before = [dict(place) for place, *_ in places]
    try:
        if not changed:
            yield
    finally:
        for (place, put, delete), kept in zip(places, before, strict=True):
            for name in {**kept, **place}:
                old, new = kept.get(name), place.get(name)
                is_code = any(callable(x) or hasattr(type(x), "__get__") for x in (old, new))
                is_code |= name == "_attn_implementation_internal"
                # A new name changes nothing, unless a hook has it or it hides an inherited one.
                counts = name in kept or name in inherited or isinstance(name, int)
                is_harmless = getattr(new, "__module__", None) in _HARMLESS
                if is_code and counts and old != new and not is_harmless:
                    changed.append(name if isinstance(name, str) else "a hook")
                    if name in kept:
                        put(name, old)
                    else:
                        delete(name)
    if changed:
        remedy = "make it a context manager, which takes that back at its end"
        raise RuntimeError(f"it changes the model for good ({changed[0]}): {remedy}")


def _needs_model(config: PreTrainedConfig, capacity: int) -> Cache:
    raise ValueError("a factory makes its cache for a model, and here is none")


@dataclass(frozen=True)
class Stranger(CacheChoice):
    """A cache that others wrote, by the factory that makes it: ``factory(model, **given)``.

    The factory also gets those of ``config``, ``capacity`` and ``device`` that it takes by name. It
    returns a cache; or a context, which is open while the prompt is read, with a cache or None for
    transformers' own; or a function in the place of ``generate``. A cache that is a context as well
    is taken as a cache.

    Attributes:
        factory: ``module:name``, or ``file.py:name``. Modules of the working directory, or beside
            the file, are found while it is loaded and called.
        given: options behind it.
    """

    make: Callable[[PreTrainedConfig, int], Cache] = _needs_model
    is_exact: bool = False
    needs_prompt: bool = True
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path | None:
        """The file of the factory; None where it is in a module."""
        place = self.factory.rpartition(":")[0]
        return Path(place).resolve() if place.endswith(".py") else None

    @contextmanager
    def open(self, model: PreTrainedModel, capacity: int) -> Iterator[Any]:
        """The factory's cache; keywords that its ``update`` does not take are dropped."""
        offered = {"config": model.config, "capacity": capacity, "device": model.device}
        digest = "" if self.file is None else sha256(self.file.read_bytes()).hexdigest()
        place = str(self.file or self.factory.replace(":", ".").rsplit(".", 2)[0])
        faults = _import_faults[place, digest]
        with _importable(Path.cwd() if self.file is None else self.file.parent):
            with _unchanged(model, next(filter(None, faults), faults[0])):
                make = self._load(digest)
            known, count = inspect.signature(make).parameters, len(sys.modules)
            made = make(model, **{x: offered[x] for x in offered if x in known} | {**self.given})
        if len(sys.modules) > count:
            faults.append(self.faults)
        updates, is_context = hasattr(made, "update"), isinstance(made, AbstractContextManager)
        if isinstance(made, type) or not (updates or is_context or callable(made)):
            raise TypeError(f"{made!r} is no cache, no context manager and no function")
        with made if is_context and not updates else nullcontext(made) as opened:
            yield DynamicCache(config=model.config) if opened is None else _tolerant(opened)

    def _load(self, digest: str) -> Callable[..., Any]:
        module, _, name = self.factory.rpartition(":")
        if self.file is None:
            return getattr(importlib.import_module(module), name)
        return getattr(_run_file(self.file, digest), name)


def is_stranger(text: str) -> bool:
    """Whether ``text`` names a factory, as ``mine=module:factory``."""
    return "=" in text.partition(":")[0]


def _stranger(text: str) -> Stranger:
    name, _, rest = (part.strip() for part in text.partition("="))
    place, _, words = rest.partition(":")
    function, *options = words.split(":")
    if not name or not place or not function.isidentifier() or name in known_caches():
        raise ValueError(
            f"{text!r}: write NAME=MODULE:FACTORY or NAME=FILE.py:FACTORY, options after colons, "
            f"with a NAME that is none of {', '.join(known_caches())}"
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise FileNotFoundError(f"{text!r}: there is no file {place}")
    given = dict(parse_option(text, word) for word in options)
    return Stranger(":".join([name, *options]), factory=f"{place}:{function}", given=given)


@functools.cache
def _run_file(path: Path, digest: str) -> ModuleType:
    """The module of a file, which runs once; again when its ``digest`` is another."""
    name = f"_hf_kvret_factory_{path.stem}_{sha256(bytes(path)).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their annotations in the module of that name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Modules of ``folder`` can be imported, as with ``python file.py``."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _tolerant(cache: Any) -> Any:
    """``cache``, from now on of a class whose ``update`` drops keywords that it does not take.

    Its layers change, too: a package may not know all that a version of transformers hands on.
    """
    for one in (cache, *(getattr(cache, "layers", None) or ())):
        if hasattr(type(one), "update"):
            one.__class__ = _tolerant_class(type(one))
    make = getattr(cache, "layer_class_to_replicate", None)
    if make is not None:
        cache.layer_class_to_replicate = lambda *args: _tolerant(make(*args))
    return cache


def _tolerant_class(cls: Any) -> Any:
    known = inspect.signature(cls.update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return cls

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.update(self, *args, **{name: kwargs[name] for name in kwargs if name in known})

    # An object with slots takes no class that adds some.
    return type(cls.__name__, (cls,), {"update": update, "__slots__": ()})


def known_caches() -> list[str]:
    """Every name that ``choose_cache`` takes, options left out."""
    return [*OPPONENTS, *registered_methods()]


def choose_cache(
    text: str, defaults: dict[str, Any] | None = None, device: str = "cpu"
) -> CacheChoice:
    """The cache that ``text`` names.

    Args:
        text: a name of ``known_caches()`` and its options, or a factory, see above.
        defaults: of retrieval caches where ``text`` and its preset say nothing, as ``top_k`` or
            ``store``.
        device: where the model is; offloading needs a CUDA device.

    Raises:
        ValueError: an unknown name, option or value, or a cache that can't work here.
        ModuleNotFoundError: the package behind an opponent is missing; says which.
    """
    if is_stranger(text):
        return _stranger(text)
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
        raise ValueError(
            f"unknown cache {name!r}: choose among {', '.join(known_caches())}, or bring your own "
            "as mine=module:factory"
        )
    if options:
        raise ValueError(f"{text!r}: {name} takes no options, got {', '.join(options)}")
    if name == "full":
        return CacheChoice(text, lambda config, capacity: DynamicCache(config=config))
    if name == "static":
        return CacheChoice(text, StaticCache)
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
    choices = {choice.name: choice for choice in map(choose, texts)}
    if len(choices) < len(texts):
        raise ValueError(f"the same cache twice in {', '.join(texts)}: name each once")
    return choices


def artifact_sha256(choice: CacheChoice, config: PreTrainedConfig) -> str | None:
    """The digest of the artifact that a cache works with, or of a factory's file; None for none.

    Raises:
        OSError, ValueError: it needs one, and there is none.
    """
    if isinstance(choice, Stranger) and choice.file is not None:
        return sha256(choice.file.read_bytes()).hexdigest()
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
    return CacheChoice(
        text,
        lambda config, capacity: QuantizedCache(config=config, **options),
        is_exact=False,
        factory="transformers:QuantizedCache",
    )


def _press(text: str) -> CacheChoice:
    try:
        import kvpress
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{text!r} needs kvpress, which alone would bring an older transformers: pip install "
            "--no-deps kvpress, and what docs/evaluation.md lists beside it"
        ) from error

    _, *words = (word.strip() for word in text.split(":"))
    if not words or not hasattr(kvpress, f"{words[0]}Press"):
        raise ValueError(
            f"{text!r}: write kvpress:NAME, as kvpress:SnapKV:compression_ratio=0.5, with the NAME "
            "of a press of kvpress"
        )
    given = {"press": words[0], **dict(parse_option(text, word) for word in words[1:])}
    return Stranger(text, factory=f"{__name__}:pressed", given=given)


@contextmanager
def pressed(model: PreTrainedModel, press: str, **options: Any) -> Iterator[None]:
    """A factory: a press of kvpress shortens transformers' own cache at the end of the prompt."""
    import kvpress

    with getattr(kvpress, f"{press}Press")(**options)(model):
        yield
