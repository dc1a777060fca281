"""Caches by name, and other people's in the same table where their packages are installed."""

import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from hf_kvret.lab.evaluate.caches import choose_cache, choose_caches, known_caches
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.methods.a2ats import A2ATSConfig

CONFIG = LlamaConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)


def test_names_of_an_artifact_stay_names() -> None:
    options = choose_cache("a2ats:artifact=7:revision=123").options
    assert isinstance(options, A2ATSConfig)
    assert (options.artifact, options.revision) == ("7", "123")


def test_opponents_are_transformers_own() -> None:
    assert type(choose_cache("full").make(CONFIG, 100)) is DynamicCache
    static = choose_cache("static").make(CONFIG, 100)
    assert isinstance(static, StaticCache) and static.layers[0].max_cache_len == 100
    names = {"full", "static", "offloaded", "quantized", "kvpress", "flat", "paris"}
    assert names <= set(known_caches())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pariss", "unknown cache 'pariss': choose among full"),
        ("full:top_k=3", "full takes no options"),
        ("paris:topk=3", "did you mean 'top_k'"),
        ("paris:top_k", "'top_k' is no option, write NAME=VALUE"),
        ("offloaded", "offloads from a CUDA device only"),
    ],
)
def test_mistakes_are_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_cache(name, device="cpu")


def test_lists_of_caches() -> None:
    assert list(choose_caches(["full", "flat:top_k=3", "flat"])) == ["full", "flat:top_k=3", "flat"]
    with pytest.raises(ValueError, match="the same cache twice"):
        choose_caches(["full", "full"])


def test_options_of_a_quantized_cache_reach_transformers() -> None:
    with pytest.raises(TypeError, match="bits"):
        choose_cache("quantized:bits=2").make(CONFIG, 100)


def test_what_a_quantized_cache_raises_ends_its_cell_alone(subject: Subject) -> None:
    choose_cache("quantized:unknown=2").check(subject.model)
    for name, kind in (("quantized", CheckFailed), ("full", TypeError)):
        with pytest.raises(kind, match="no sliding"), choose_cache(name).guard(subject.model):
            raise TypeError("no sliding layers")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps kvpress"):
        choose_cache("kvpress:SnapKV")


def _needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module.split(".")[0]) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


QUANTIZED = [
    pytest.param("quantized:backend=quanto:nbits=4", 0.30, marks=_needs("optimum.quanto")),
    pytest.param("quantized:backend=hqq:nbits=4", 0.30, marks=_needs("hqq")),
]
PRESSED = [
    pytest.param("kvpress:SnapKV:compression_ratio=0.5", 0.5, marks=_needs("kvpress")),
    pytest.param("kvpress:Knorm:compression_ratio=0.75", 0.25, marks=_needs("kvpress")),
]


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(3, 400, (600,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "most"), QUANTIZED)
def test_quantized_rows_take_few_bytes_and_stay_close(
    name: str, most: float, subject: Subject, text: torch.Tensor
) -> None:
    full, reader = (
        Reader(subject.model, choose_cache(cache), len(text) + 200) for cache in ("full", name)
    )
    expected, got = full.prefill(text[:-1]), reader.prefill(text[:-1])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    usage = reader.usage()
    assert 0.1 < usage.device_bytes / usage.full_bytes < most
    check_forks(reader, text)
    expected, got = full.feed(text[-1:]), reader.feed(text[-1:])
    assert not torch.equal(got, expected)
    assert torch.cosine_similarity(got, expected).item() > 0.9


class Sealed(DynamicLayer):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("implement clone()")


def test_a_quantized_cache_that_can_not_be_copied_is_read_again(
    subject: Subject, text: torch.Tensor
) -> None:
    """As tensors of quanto with torch 2.13."""
    choice = replace(choose_cache("quantized"), make=lambda *_: Cache(layers=[Sealed(), Sealed()]))
    reader = Reader(subject.model, choice, len(text) + 200)
    reader.prefill(text)
    check_forks(reader, text)


@pytest.mark.parametrize(("name", "left"), PRESSED)
def test_a_press_leaves_its_share_of_rows(
    name: str, left: float, subject: Subject, text: torch.Tensor
) -> None:
    reader = Reader(subject.model, choose_cache(name), len(text) + 200)
    reader.prefill(text)
    usage = reader.usage()
    assert usage.device_bytes / usage.full_bytes == pytest.approx(left, abs=0.01)
    assert usage.read_ratio == pytest.approx(left, abs=0.01)
    check_forks(reader, text)
    # Later tokens keep their true positions and are not pressed.
    reader.feed(text[:10])
    assert reader.length == 610
    assert reader.cache.get_seq_length() == pytest.approx(left * 600 + 10, abs=6)


def check_forks(reader: Reader, text: torch.Tensor) -> None:
    """Forks go the same way, whatever another one does."""
    first, again = reader.fork(), reader.fork()
    given = first.answer(first.feed(text[:3]), 6)
    # More than a residual window, so that a quantized cache folds it in.
    reader.fork().feed(text[:150])
    assert again.answer(again.feed(text[:3]), 6) == given
