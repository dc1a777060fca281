"""``hf-kvret eval ruler``: cells, scores, and both places of the question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.tasks import ruler

from .runs import run_eval


def _run(folder: Path, model: Path, *more: str) -> list[dict[str, Any]]:
    words = ["--model", str(model), "--context", "1100", "--samples", "1", *more]
    return run_eval("ruler", folder / "ruler.json", *words)


def test_a_covering_cache_answers_as_full_attention_does(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("niah_single_1", "vt"):
        monkeypatch.setitem(ruler.TASKS, name, replace(ruler.TASKS[name], max_new_tokens=4))
    begin, passes = ruler.begin, list[tuple[bool, int]]()

    def noted(*given: Any, whole: bool) -> Any:
        passes.append((whole, len(given[3])))
        return begin(*given, whole=whole)

    monkeypatch.setattr(ruler, "begin", noted)
    picture, flat = tmp_path / "ruler.png", "flat:top_k=1.0:dense_below=0:recent=64"
    more = ["--tasks", "niah_single_1,vt", "--questions", "both", "--plot", str(picture)]
    cells = _run(tmp_path, tiny_model_dir, *more, "--caches", f"full,{flat}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = {tuple(one["cell"].values()): one["result"] for one in cells}
    assert len(results) == 2 * 2 * 2
    for (_, *place), result in results.items():
        assert result["answers"] == results["full", *place]["answers"] and any(result["answers"])
        assert len(result["scores"]) == 1 and 0 <= result["score"] <= 100
        assert result["read_ratio"] == pytest.approx(1.0, abs=0.1)
    # Inside comes first: the question is read with the text, and else fed after it.
    assert passes[0] == (True, 0) and passes[2][0] is False and passes[2][1] > 0
    printed = capsys.readouterr().out
    assert "| niah_single_1" in printed and "full, 1100 after" in printed


def test_an_answer_ends_when_its_score_is_full(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def right_after_three(task: str, text: str, references: tuple[str, ...]) -> float:
        calls.append(text)
        return float(len(calls) == 3)

    monkeypatch.setattr(ruler, "sample_score", right_after_three)
    monkeypatch.setattr(ruler, "end_tokens", lambda subject: frozenset())
    _run(tmp_path, tiny_model_dir, "--tasks", "vt", "--caches", "full")
    # Three tokens, then the finished answer once more.
    assert len(calls) == 4 and calls[2] == calls[3]
