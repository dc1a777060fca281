"""Damaged and crafted caches: refused, or as good as they claim to be; never a late failure.

A damaged cache is refused with ValueError or OSError, or holds exactly what was saved. A crafted
one, whose checksums are right, is refused so, too, or serves passes of every kind without an error:
what it holds is then a cache, if not the one that was saved.
"""

from __future__ import annotations

import dataclasses
import random
import runpy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import RetrievalCache, attach, registered_methods
from hf_kvret.testing import LATENT_MODELS, MODELS
from hf_kvret.testing.scenario import prompt

from . import mutations
from .saved_files import read_saved
from .wrong_ids import crafted_ids

TESTS = Path(__file__).parents[1]
make = SimpleNamespace(**runpy.run_path(str(TESTS / "fixtures" / "make_saved.py")))

COUNT, SAMPLE = 1000, 100
SMALL: dict[str, Any] = {**make.OPTIONS, "max_draft": 6}
_LATENT = {"model": "deepseek_v3"}
# The first of them, which the sample takes, have each method and each store once.
BASES: list[tuple[str, dict[str, Any]]] = [
    ("flat", {"store": "device"}),
    ("paris", {"store": "higgs", "bits": 4}),
    ("lrqk", {"store": "cpu", "rank": 4}),
    ("lrqk", {"store": "device", "rank": 4, "factors": "als"}),
    ("ctkvr", {"store": "host"}),
    ("h2o", {"store": "resident"}),
    ("a2ats", {"store": "split", "device_budget": 20_000}),
    ("aqua", {"store": "device"}),
    ("aqua", {"store": "host", "backbone": "kivi", "predictor": "none"}),
    ("latent", {"store": "device", **_LATENT}),
    ("paris", {"store": "higgs-host", "bits": 3, **_LATENT}),
    ("flat", {"store": "device", "model": "gemma3"}),
    ("flat", {"store": "device", "model": "qwen3_next"}),
    ("lrqk", {"store": "host", "rank": 4, "proxy_dtype": "int8", "shared": False}),
    ("lrqk", {"store": "higgs", "rank": 4, "factors": "als", "init": "top"}),
    ("ctkvr", {"store": "device", "rerank": "codes"}),
    ("ctkvr", {"store": "cpu", "rerank": "lists", "update": 2, "choice": "last"}),
    ("h2o", {"store": "device", "observed": 4}),
    ("aqua", {"store": "device", "predictor": "none", "keep": "rows"}),
    ("a2ats", {"store": "higgs", "bits": 2}),
    ("paris", {"store": "resident", "model": "lfm2", "top_k": 4}),
    ("h2o", {"store": "device", **_LATENT}),
    ("paris", {"store": "device", "dense_below": 200}),
    ("lrqk", {"store": "device", "factors": "als", "rank": 4, "dense_below": 200}),
    ("ctkvr", {"store": "device", "dense_below": 200}),
]
SAMPLED_BASES = 12


@dataclass(frozen=True)
class Base:
    """A saved cache, another of the same form, and what it comes back as."""

    model: PreTrainedModel
    kind: type[RetrievalCache]
    folder: Path
    other: Path
    options: dict[str, Any]
    content: dict[str, torch.Tensor]

    def load(self, folder: Path) -> RetrievalCache:
        return self.kind.from_pretrained(folder, self.model.config, **self.options)


def _content(cache: RetrievalCache) -> dict[str, torch.Tensor]:
    content = {}
    for number, layer in enumerate(cache.layers):
        if hasattr(layer, "state_dict"):
            parts = layer.state_dict()
        else:
            parts = {name: x for name, x in vars(layer).items() if isinstance(x, torch.Tensor)}
            states = {**getattr(layer, "conv_states", {}), **getattr(layer, "recurrent_states", {})}
            parts |= {f"state {i}": x for i, x in states.items() if x is not None}
            plain = {
                name: x
                for name, x in vars(layer).items()
                if isinstance(x, bool | int | str | list | torch.dtype)
            }
            content[f"{number} {sorted(plain.items())}"] = torch.zeros(0)
        content |= {f"{number}.{name}": x for name, x in parts.items()}
    return content


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        x.dtype == two[name].dtype
        and x.shape == two[name].shape
        and torch.equal(_bytes(x), _bytes(two[name]))
        for name, x in one.items()
    )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _passes(model: PreTrainedModel, cache: RetrievalCache, finite: bool = True) -> None:
    """Steps, flushes, a question, a fork, beams, a crop, a second prompt, a save.

    AssertionError for logits that are not ``finite``.
    """

    def run(ids: torch.Tensor, cache: RetrievalCache) -> None:
        logits = model(ids, past_key_values=cache).logits
        assert not finite or bool(logits.isfinite().all())

    if cache.get_seq_length():
        cache.reorder_cache(torch.tensor([1, 0]))
    for count in (1, 1, 1, 3, 1, 1, 1):
        run(prompt(2, count, salt=5), cache)
    twin = cache.fork()
    for each in (cache, twin):
        if len(cache.retrieval_layers) == len(cache.layers):
            each.crop(-2)
        run(prompt(2, 30, salt=6), each)
        run(prompt(2, 1, salt=7), each)
    for layer in cache.retrieval_layers:
        layer.state_dict()
    cache.stats()
    cache.memory()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: dict[int, Base] = {}
    models: dict[str, PreTrainedModel] = {}

    def model_of(name: str) -> PreTrainedModel:
        if name not in models:
            zoo = MODELS | LATENT_MODELS
            models[name] = make.load_model() if name == "llama" else zoo[name].build()
            attach(models[name])
        return models[name]

    def base(number: int) -> Base:
        if number not in made:
            method, given = BASES[number]
            options = {"top_k": 12, **SMALL, **given}
            model = model_of(options.pop("model", "llama"))
            place = make.place(method) if options.get("predictor") != "none" else {}
            kind = registered_methods()[method]
            root = tmp_path_factory.mktemp(f"base-{number}")
            for name, salt in (("one", 0), ("two", 3)):
                takes = kind.Config.takes
                fit = {key: value for key, value in options.items() if takes(key, value)}
                cache = kind(model.config, **fit, **place)
                with torch.no_grad():
                    for count in (60, 1, 1, 6, 1):
                        model(prompt(2, count, salt=salt), past_key_values=cache)
                cache.save_pretrained(root / name)
            folder, other = root / "one", root / "two"
            content = _content(kind.from_pretrained(folder, model.config, **place))
            made[number] = Base(model, kind, folder, other, place, content)
        return made[number]

    yield base


def _cases() -> Iterator[Any]:
    kinds: list[Any] = [*mutations.DAMAGES, *mutations.CRAFTS, *mutations.CRAFTS]
    kinds += mutations.IN_FOLDER * 3
    for number in range(COUNT):
        slow = [pytest.mark.slow] if number >= SAMPLE else []
        yield pytest.param(number, kinds[number % len(kinds)], marks=slow)


@pytest.mark.parametrize(("number", "mutation"), _cases())
def test_a_mutated_cache_is_refused_or_serves(
    bases: Any, number: int, mutation: Any, tmp_path: Path
) -> None:
    chance = random.Random(number)
    base = bases(chance.randrange(SAMPLED_BASES if number < SAMPLE else len(BASES)))
    folder = tmp_path / "case"
    shutil.copytree(base.folder, folder)
    damaged = mutation in mutations.DAMAGES
    if damaged:
        mutation(chance, folder, base.other)
    elif mutation in mutations.IN_FOLDER:
        mutation(chance, folder)
    else:
        mutations.craft(chance, folder, mutation)
    try:
        cache = base.load(folder)
    except (ValueError, OSError) as refused:
        assert len(str(refused)) < 2000
        return
    if damaged:
        assert _equal(_content(cache), base.content)
        saved, options = base.load(base.folder).options, cache.options
        assert dataclasses.asdict(saved) == dataclasses.asdict(options)
        return
    # Rows may be infinite where a model made them so; what reads them is, too. KIVI's bytes hold
    # scales beside codes.
    any_floats = [mutations.not_finite]
    if getattr(cache.options, "backbone", None) == "kivi":
        any_floats.append(mutations.other_numbers)
    finite = mutation not in any_floats
    try:
        with torch.no_grad():
            _passes(base.model, cache, finite)
    except ValueError as refused:
        # The first pass of several tokens tells that another model filled it.
        assert mutation is mutations.deep
        assert str(refused).startswith(("past_key_values was made for", "past_key_values was fill"))


def _ids() -> list[Any]:
    """Numbers of bases, and which part of the wrong ids: some, and with ``slow`` all."""
    few = [(1, 9), (4, 9), (5, 9)]
    return [*few, *(pytest.param(n, 1, marks=pytest.mark.slow) for n in range(len(BASES)))]


@pytest.mark.parametrize(("number", "every"), _ids())
def test_crafted_ids_are_refused_or_serve(
    bases: Any, number: int, every: int, tmp_path: Path
) -> None:
    """Whatever ids, offsets and counts say, no kernel reads outside: see .ci/sanitize caches."""
    base = bases(number)
    _, tensors = read_saved(base.folder)
    # Each part of a layer once: layers are alike.
    whole = {
        name.split(".", 2)[2]: name
        for name, x in tensors.items()
        if name.startswith("layers.") and x.numel() and not x.is_floating_point()
    }
    crafts = [
        (part, craft)
        for part, name in whole.items()
        for craft in crafted_ids(name, tensors[name].dtype)
    ]
    refused = 0
    for part, craft in crafts[::every]:
        folder = tmp_path / "case"
        shutil.copytree(base.folder, folder)
        mutations.craft(random.Random(0), folder, craft)
        try:
            cache = base.load(folder)
        except ValueError:
            refused += 1
            continue
        finally:
            shutil.rmtree(folder)
        with torch.no_grad():
            # Codes of rows may stand for any numbers.
            _passes(base.model, cache, finite=not part.startswith("store."))
    assert 0 < refused < len(crafts)


@pytest.mark.parametrize("number", range(SAMPLED_BASES))
def test_what_is_not_mutated_loads(bases: Any, number: int, tmp_path: Path) -> None:
    """So that the mutations above are what is refused."""
    base = bases(number)
    folder = tmp_path / "case"
    shutil.copytree(base.folder, folder)
    mutations.craft(random.Random(0), folder, lambda *_: None)
    cache = base.load(folder)
    assert _equal(_content(cache), base.content)
    with torch.no_grad():
        _passes(base.model, cache)
