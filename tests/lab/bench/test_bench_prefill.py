"""``bench prefill`` reads prompts in chunks, and its table says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench import passes as measured
from hf_kvret.lab.report.results import Results

SMALL = "dense_below=0:recent=32:flush=32:top_k=16"
ONCE = ["--context", "512", "--steps", "1", "--warmup", "0", "--rounds", "1"]
CACHES = f"dense,flat:{SMALL},flat:{SMALL}:prefill_chunk=200"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each pass that was timed."""
    lengths: list[int] = []
    feed = measured.feed

    def fed(model: Any, cache: Any, tokens: Any, start: int) -> Any:
        # A pass begins where the cache ends.
        assert cache.get_seq_length() == start
        lengths.append(tokens.shape[1])
        return feed(model, cache, tokens, start)

    monkeypatch.setattr(measured, "feed", fed)
    return lengths


def test_caches_read_in_chunks(
    measure: Callable[..., Results], passes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    results = measure("prefill", *ONCE, "--caches", CACHES)
    assert [row["chunk"] for _, row in results] == [None, None, 200]
    assert passes == [512, 512, 200, 200, 112]
    assert "Tokens of a pass, where it was not all" in capsys.readouterr().out


def test_a_cache_is_told_of_its_prompt_as_generate_tells_it(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[tuple[int, int]] = []
    expect = RetrievalCache.expect

    def note(self: RetrievalCache, tokens: int, chunk: int) -> None:
        prompts.append((tokens, chunk))
        expect(self, tokens, chunk)

    monkeypatch.setattr(RetrievalCache, "expect", note)
    assert bench("prefill", *ONCE, "--caches", CACHES) == 0
    assert prompts == [(512, 512), (512, 200)]
