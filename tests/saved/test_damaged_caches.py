"""A damaged cache is refused with ValueError or OSError, or holds exactly what was saved."""

import dataclasses
import random
import runpy
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from hf_kvret import RetrievalCache, registered_methods

from .saved_files import saved_file

make = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[1] / "fixtures" / "make_saved.py"))
)
CACHES = make.SAVED / "caches"
METHODS = sorted(path.name for path in CACHES.iterdir())
# Three of each damage by default.
COUNT, SAMPLE = 300, 18
DESCRIPTION = "cache.json"
Damage = Callable[[random.Random, Path, Path], None]


def truncated(chance: random.Random, folder: Path, other: Path) -> None:
    path = _any_file(chance, folder)
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size - 1)])


def flipped(chance: random.Random, folder: Path, other: Path) -> None:
    path = _any_file(chance, folder)
    content = bytearray(path.read_bytes())
    for place in chance.sample(range(len(content)), chance.choice([1, 4, 64])):
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def longer(chance: random.Random, folder: Path, other: Path) -> None:
    path = saved_file(folder)
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.choice([1, 8, 4096])))


def tensors_of_another(chance: random.Random, folder: Path, other: Path) -> None:
    shutil.copy(saved_file(other), saved_file(folder))


def description_of_another(chance: random.Random, folder: Path, other: Path) -> None:
    shutil.copy(other / DESCRIPTION, folder / DESCRIPTION)


def no_file(chance: random.Random, folder: Path, other: Path) -> None:
    path = _any_file(chance, folder)
    path.unlink()
    if chance.randrange(2):
        path.write_bytes(chance.randbytes(chance.choice([0, 5000])))


def _any_file(chance: random.Random, folder: Path) -> Path:
    return chance.choice([saved_file(folder), folder / DESCRIPTION])


DAMAGES: list[Damage] = [
    *(truncated, flipped, longer, tensors_of_another, description_of_another, no_file)
]


@cache
def _config() -> PreTrainedConfig:
    return make.load_model().config


def _load(method: str, folder: Path) -> RetrievalCache:
    return registered_methods()[method].from_pretrained(folder, _config(), **make.place(method))


def _content(cache: RetrievalCache) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": x
        for number, layer in enumerate(cache.retrieval_layers)
        for name, x in layer.state_dict().items()
    }


@cache
def _whole(method: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Options and content of what was saved."""
    cache = _load(method, CACHES / method)
    return dataclasses.asdict(cache.options), _content(cache)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By method, the folder of another cache of the same form."""
    root = tmp_path_factory.mktemp("other")

    def folder_of(method: str) -> Path:
        if not (root / method).exists():
            cache = _load(method, CACHES / method)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.save_pretrained(root / method)
        return root / method

    return folder_of


@pytest.mark.parametrize(
    "number",
    [*range(SAMPLE), *(pytest.param(n, marks=pytest.mark.slow) for n in range(SAMPLE, COUNT))],
)
def test_a_damaged_cache_is_refused_or_the_same(
    number: int, other: Callable[[str], Path], tmp_path: Path
) -> None:
    chance = random.Random(number)
    round_, kind = divmod(number, len(DAMAGES))
    method, damage = METHODS[(number + round_) % len(METHODS)], DAMAGES[kind]
    folder = tmp_path / "case"
    shutil.copytree(CACHES / method, folder)
    damage(chance, folder, other(method))
    try:
        loaded = _load(method, folder)
    except (ValueError, OSError) as refused:
        assert len(str(refused)) < 2000
        return
    options, expected = _whole(method)
    assert dataclasses.asdict(loaded.options) == options
    contents = _content(loaded)
    assert contents.keys() == expected.keys()
    for name, x in contents.items():
        assert x.dtype == expected[name].dtype and torch.equal(x, expected[name])
