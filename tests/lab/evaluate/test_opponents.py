"""Other people's caches in the same table; each test skips where its package is not installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject


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
        Reader(subject.model, choose_cache(cache), len(text)) for cache in ("full", name)
    )
    expected, got = full.prefill(text[:-1]), reader.prefill(text[:-1])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    usage = reader.usage()
    assert 0.1 < usage.device_bytes / usage.full_bytes < most
    expected, got = full.feed(text[-1:]), reader.feed(text[-1:])
    assert not torch.equal(got, expected)
    assert torch.cosine_similarity(got, expected).item() > 0.9


@pytest.mark.parametrize(("name", "left"), PRESSED)
def test_a_press_leaves_what_it_was_told_to(
    name: str, left: float, subject: Subject, text: torch.Tensor
) -> None:
    reader = Reader(subject.model, choose_cache(name), len(text) + 10)
    reader.prefill(text)
    usage = reader.usage()
    assert usage.device_bytes / usage.full_bytes == pytest.approx(left, abs=0.01)
    assert usage.read_ratio == pytest.approx(left, abs=0.01)
    # Later tokens keep their true positions and are not pressed.
    reader.feed(text[:10])
    assert reader.length == 610
    assert reader.cache.get_seq_length() == pytest.approx(left * 600 + 10, abs=6)


def test_a_preallocated_cache_counts_what_it_allocates(
    subject: Subject, text: torch.Tensor
) -> None:
    reader = Reader(subject.model, choose_cache("static"), 2 * len(text))
    reader.prefill(text)
    usage = reader.usage()
    assert usage.device_bytes == pytest.approx(2 * usage.full_bytes, rel=0.01)


@pytest.mark.parametrize(("name", "_"), [*QUANTIZED, *PRESSED])
def test_forks_leave_each_other_alone(
    name: str, _: float, subject: Subject, text: torch.Tensor
) -> None:
    reader = Reader(subject.model, choose_cache(name), len(text) + 200)
    reader.prefill(text)
    given = reader.fork().answer(text[:3], 6)
    # More than a residual window, so that a quantized cache folds it in.
    reader.fork().feed(text[:150])
    assert reader.fork().answer(text[:3], 6) == given
    assert reader.answer(text[:3], 6) == given
