"""``hf-kvret eval ruler``: cells, scores, both places of the question, and going on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hf_kvret.cli import main
from hf_kvret.lab.evaluate.tasks import ruler

TASKS = "niah_single_1,vt"


def _arguments(model: Path, *more: str) -> list[str]:
    caches = "full,flat:top_k=1.0:dense_below=0:recent=64"
    return [
        "eval",
        "ruler",
        *("--model", str(model), "--tasks", TASKS, "--context", "1100", "--samples", "2"),
        *("--caches", caches, *more),
    ]


def test_a_covering_cache_answers_as_full_attention_does(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in TASKS.split(","):
        monkeypatch.setitem(ruler.TASKS, name, replace(ruler.TASKS[name], max_new_tokens=10))
    file, picture = tmp_path / "ruler.json", tmp_path / "ruler.png"
    more = ["--questions", "both", "--json", str(file), "--plot", str(picture)]
    assert main(_arguments(tiny_model_dir, *more)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(file.read_text())
    cells = {tuple(entry["cell"].values()): entry["result"] for entry in content["cells"]}
    assert len(cells) == 2 * 2 * 2
    for (cache, *place), result in cells.items():
        full = cells["full", *place]
        assert result["answers"] == full["answers"] and any(result["answers"])
        assert len(result["scores"]) == 2 and 0 <= result["score"] <= 100
        if cache != "full":
            assert result["read_ratio"] == pytest.approx(1.0, abs=0.1)
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
    arguments = _arguments(tiny_model_dir, "--json", str(tmp_path / "r.json"), "--tasks", "vt")
    assert main([*arguments, "--caches", "full", "--samples", "1"]) == 0
    # Three tokens, then the finished answer once more.
    assert len(calls) == 4 and calls[2] == calls[3]
