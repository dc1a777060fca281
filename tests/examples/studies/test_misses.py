"""The hit/miss buffer along a generation: its counts, and the run without it that it must equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from misses import Generation, Misses

from hf_kvret import FlatKVCache
from hf_kvret.core.store import AttentionResult
from hf_kvret.evaluation.contexts import text_windows
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.stretches import sampling_source
from hf_kvret.evaluation.subject import load_subject
from hf_kvret.io.reports import MemoryReport
from hf_kvret.stores import PagedStore, ResidentStore
from hf_kvret_kernels._dispatch import prefer

REGIONS: dict[str, Any] = {"dense_below": 0, "recent": 16, "flush": 16}
SMALL = ":".join(f"{name}={value}" for name, value in REGIONS.items())
FLAT = f"flat:{SMALL}"
LENGTH, NEW, EVERY, TOP_K = 120, 40, 16, 8
LAYERS, HEADS = 2, 2
ROW_BYTES = 2 * 64 * 4


def _arguments(model: Path, text: Path) -> list[str]:
    arguments = ["--model", str(model), "--text", str(text), "--context", str(LENGTH)]
    arguments += ["--new-tokens", str(NEW), "--every", str(EVERY), "--top-ks", str(TOP_K)]
    return [*arguments, "--slots", "1", "--caches", FLAT]


def _run(path: Path, *arguments: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    assert run_script(Misses, ["--json", str(path), *arguments]) == 0
    return [(one["cell"], one["result"]) for one in json.loads(path.read_text())["cells"]]


def test_misses_are_the_rows_that_the_step_before_did_not_select(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many slots as a step selects hold the last selection; counted from a plain run here."""
    picture, table = tmp_path / "m.png", tmp_path / "m.txt"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--plot", str(picture)]
    ((_, found),) = _run(tmp_path / "m.json", *arguments, "--table", str(table))
    subject = load_subject(str(tiny_model_dir))
    (context,) = text_windows(subject, "test", tiny_text, LENGTH, 0, 1, None)
    selections: dict[int, list[torch.Tensor]] = {}
    begin = PagedStore.begin

    def recording(self: PagedStore, query: Any, ids: torch.Tensor, *rest: Any) -> Any:
        selections.setdefault(id(self), []).append(ids)
        return begin(self, query, ids, *rest)

    monkeypatch.setattr(PagedStore, "begin", recording)
    cache = FlatKVCache(subject.model.config, top_k=TOP_K, store="host", **REGIONS)
    draw = sampling_source(42)
    # Part by part, so that the store sees the ids.
    with torch.inference_mode(), prefer("naive"):
        logits = subject.model(context[None], past_key_values=cache).logits[0, -1]
        for place in range(NEW):
            token = draw(logits, place)
            logits = subject.model(token[None], past_key_values=cache).logits[0, -1]
    missed = torch.zeros(LAYERS, NEW)
    for layer, ids in enumerate(selections.values()):
        assert len(ids) == NEW and all(one.shape == (1, HEADS, 1, TOP_K) for one in ids)
        for head in range(HEADS):
            before: set[int] = set()
            for step, one in enumerate(ids):
                now = set(one[0, head, 0].tolist())
                missed[layer, step] += len(now - before)
                before = now
    ratio = missed / (HEADS * TOP_K)
    assert 0.0 < ratio.mean() < 1.0
    assert found["miss_ratio"] == pytest.approx(float(ratio.mean()))
    assert [one["layer"] for one in found["layers"]] == [0, 1]
    by_layer = [one["miss_ratio"] for one in found["layers"]]
    assert by_layer == pytest.approx(ratio.mean(1).tolist())
    assert [one["end"] for one in found["stretches"]] == [16, 32, 40]
    for start, one in zip((0, 16, 32), found["stretches"], strict=True):
        assert one["miss_ratio"] == pytest.approx(float(ratio[:, start : one["end"]].mean()))
    assert found["bus_bytes"] == pytest.approx(float(missed.sum()) * ROW_BYTES / NEW)
    assert found["plain_bus_bytes"] == LAYERS * HEADS * TOP_K * ROW_BYTES
    assert found["saved_ratio"] == pytest.approx(1 - found["bus_bytes"] / found["plain_bus_bytes"])
    assert found["equal_tokens"] == NEW
    assert picture.stat().st_size > 1000
    assert f"| {100 * found['miss_ratio']:.1f}% " in table.read_text()


def test_more_slots_miss_less_and_share_the_run_without(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, buffered = [], []
    prefill = Reader.prefill

    def noting(self: Reader, *given: Any) -> torch.Tensor:
        options = self.cache.options  # type: ignore[attr-defined]
        slots = options.slots if options.store == "resident" else None
        runs.append((self.cache.name, options.top_k, slots))  # type: ignore[attr-defined]
        buffered.extend([self.cache] if slots else [])
        return prefill(self, *given)

    monkeypatch.setattr(Reader, "prefill", noting)
    caches = f"{FLAT},lrqk:rank=8:{SMALL}"
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--caches", caches]
    found = _run(tmp_path / "m.json", *arguments, "--slots", "1,2.5", "--top-ks", "8,0.2")
    assert runs == [
        (name, top_k, slots)
        for name in ("flat", "lrqk")
        for top_k in (8, 0.2)
        for slots in (None, 1.0, 2.5)
    ]
    for (cell, few), (other, many) in zip(found[::2], found[1::2], strict=True):
        assert (cell["slots"], other["slots"]) == (1.0, 2.5)
        assert 0.0 < many["miss_ratio"] < few["miss_ratio"]
        assert many["plain_bus_bytes"] == few["plain_bus_bytes"]
        assert many["plain_seconds"] == few["plain_seconds"] > 0.0
    for cache, (cell, one) in zip(buffered, found, strict=True):
        held = [layer.regions.store._buffer for layer in cache.retrieval_layers]
        assert one["buffer_bytes"] == sum(buffer.nbytes() for buffer in held)
        if cell["top_k"] == TOP_K:
            assert all(buffer.slots == TOP_K * cell["slots"] for buffer in held)


def test_runs_differ_where_a_token_or_the_best_one_does() -> None:
    def run(tokens: list[int], choices: list[int]) -> Generation:
        memory = MemoryReport(0, 0, 0, 0, 0, 0, 0)
        return Generation(torch.tensor(tokens), torch.tensor(choices), [], memory, 0.0)

    one = run([1, 2, 3], [1, 5, 3, 4])
    assert one.first_difference(run([1, 2, 3], [1, 5, 3, 4])) is None
    assert one.first_difference(run([1, 7, 3], [1, 5, 3, 4])) == 1
    assert one.first_difference(run([1, 2, 7], [7, 5, 3, 4])) == 0
    assert one.first_difference(run([1, 2, 3], [1, 5, 3, 7])) == 3


@pytest.mark.parametrize("follow", ["sample", "greedy", "text"])
def test_a_buffer_that_changes_a_token_is_an_error(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    follow: str,
) -> None:
    begin, calls, wrong_step = ResidentStore.begin, [], 10

    def sabotaged(self: ResidentStore, *arguments: Any) -> Callable[[], AttentionResult]:
        out, lse = begin(self, *arguments)()
        calls.append(1)
        wrong = len(calls) > LAYERS * wrong_step
        return lambda: (-8.0 * out, lse + 8.0) if wrong else (out, lse)

    monkeypatch.setattr(ResidentStore, "begin", sabotaged)
    arguments = [*_arguments(tiny_model_dir, tiny_text), "--follow", follow]
    # Ten tokens were fed rightly; the eleventh's step is the first to foresee another token.
    place = rf"flat:.*new token 12 \(position {LENGTH + 11}\)"
    assert run_script(Misses, ["--json", str(tmp_path / "m.json"), *arguments]) == 1
    assert re.search(place, capsys.readouterr().out)
    assert not (tmp_path / "m.json").exists()


def test_tokens_are_drawn_or_the_best_or_the_text_s(
    tmp_path: Path, tiny_model_dir: Path, tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[list[int]] = []
    best: list[int] = []
    feed = Reader.feed

    def noting(self: Reader, tokens: torch.Tensor, keep: int = 1) -> torch.Tensor:
        logits = feed(self, tokens, keep)
        if len(tokens) > 1:
            fed.append([])
            best.clear()
        else:
            fed[-1].append(int(tokens))
        best.append(int(logits[-1].argmax()))
        return logits

    monkeypatch.setattr(Reader, "feed", noting)

    def tokens(*options: str) -> list[int]:
        fed.clear()
        _run(tmp_path / f"{len(list(tmp_path.iterdir()))}.json", *arguments, *options)
        # Without the buffer and with it.
        plain, buffered = fed
        assert plain == buffered and len(plain) == NEW
        return plain

    arguments = _arguments(tiny_model_dir, tiny_text)
    subject = load_subject(str(tiny_model_dir))
    (window,) = text_windows(subject, "test", tiny_text, LENGTH, NEW, 1, None)
    assert tokens("--follow", "text") == window[LENGTH:].tolist()
    greedy = tokens("--follow", "greedy")
    assert greedy == best[:-1]
    drawn = [tokens("--seed", seed) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert greedy not in drawn


def test_the_table_says_what_was_found() -> None:
    results = Results("eval misses", {"follow": "sample"})
    found = {
        "miss_ratio": 0.25,
        "layers": [{"layer": 0, "miss_ratio": 0.4}, {"layer": 3, "miss_ratio": 0.1}],
        "bus_bytes": 2500.0,
        "plain_bus_bytes": 10_000.0,
        "saved_ratio": 0.75,
        "seconds": 0.006,
        "plain_seconds": 0.004,
        "buffer_bytes": 1_500_000,
        "full_bytes": 30_000_000,
    }
    results.add({"cache": "flat", "length": 64, "top_k": 0.1, "slots": 1.5}, found)
    cells = [cell.strip() for cell in Misses.table(results).splitlines()[-1].strip("|").split("|")]
    assert cells == [
        *("flat", "64", "0.1", "1.5", "25.0%", "10.0% to 40.0%", "2.5", "10.0", "75.0%"),
        *("6.00", "4.00", "1.50", "1.50", "5.0%"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slots", "0.5"), "slots=0.5: a float is a multiple of the budget, at least 1.0"),
        (("--slots", "2,2.0"), "--slots: the same number twice"),
        (("--top-ks", "8,8"), "--top-ks: the same number twice"),
        (("--caches", "full"), "--caches full: misses is about selected rows"),
        (("--caches", "flat:top_k=8"), "top_k is chosen by misses itself: leave it out, use --top"),
        (("--caches", "flat:slots=2.0"), "slots is chosen by misses itself"),
        (("--caches", "flat:store=host"), "store is chosen by misses itself"),
        (("--caches", "flat"), "--context 120: flat selects nothing after it"),
        (("--text", "missing.txt"), "--text missing.txt: no such file"),
        (("--context", "1M"), "fewer than the"),
        (("--model", "needle"), "needs a tokenizer"),
    ],
)
def test_mistakes_are_one_line_each(
    tiny_model_dir: Path,
    tiny_text: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert run_script(Misses, [*_arguments(tiny_model_dir, tiny_text), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("misses.py: error: ") and message in error


def test_numbers_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_script(Misses, ["--text", "x", "--slots", "one"])
    assert "--slots: 'one' is no number above 0" in capsys.readouterr().err
