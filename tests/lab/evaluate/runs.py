"""Runs of ``hf-kvret eval``, and what a model says without any cache."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from hf_kvret.cli import main


def run_eval(task: str, path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The cells of a run whose results go to ``path``."""
    assert main(["eval", task, "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text())["cells"]


def results_by_cache(task: str, path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The results of a run with one cell a cache."""
    cells = run_eval(task, path, *arguments)
    return {entry["cell"]["cache"]: entry["result"] for entry in cells}


def greedy(model: Any, tokens: torch.Tensor, count: int, stop: Collection[int] = ()) -> list[int]:
    """Up to ``count`` best tokens after ``tokens [n]``, each of a pass over all before it."""
    answer: list[int] = []
    with torch.inference_mode():
        while len(answer) < count:
            text = torch.cat([tokens, torch.tensor(answer, dtype=torch.long)])
            best = int(model(text[None], use_cache=False).logits[0, -1].argmax())
            if best in stop:
                break
            answer.append(best)
    return answer
