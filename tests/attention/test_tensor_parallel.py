"""Two ranks, each with a part of the heads: the tokens of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret.testing import LATENT_MODELS, MODELS

RANK = Path(__file__).with_name("tensor_parallel_rank.py")
RANKS = 2


def start(folder: Path, out: Path, ranks: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(RANK), str(folder), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | ranks,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def results(folder: Path, out: Path, ranks: int) -> list[dict[str, Any]]:
    """Of each rank; of one process alone where ``ranks`` is 1."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [
        {**address, "RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": str(ranks)}
        for i in range(ranks)
    ]
    running = [start(folder, out, place) for place in (places if ranks > 1 else [{}])]
    try:
        for process in running:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()
    names = [str(i) for i in range(ranks)] if ranks > 1 else ["one"]
    return [torch.load(f"{out}.{name}.pt") for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_each_rank_gives_what_one_process_gives(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers spreads a model with accelerate")
    model = LATENT_MODELS[family].build()
    model.save_pretrained(tmp_path / "model")
    (expected,) = results(tmp_path / "model", tmp_path / "out", 1)
    name, shape, (heads, width, rank) = expected.pop("weight")
    assert (name, shape) == ("Parameter", (heads * width, rank))
    text = expected["dynamic"]
    assert all(torch.equal(found, text) for found in expected.values())
    for found in results(tmp_path / "model", tmp_path / "out", RANKS):
        # These are this rank's heads of a weight that knows its whole shape.
        assert found.pop("weight") == ("DTensor", shape, (heads // RANKS, width, rank))
        assert found.keys() == expected.keys()
        assert [method for method in found if not torch.equal(found[method], text)] == []


@pytest.mark.slow
def test_each_rank_selects_and_samples_as_one_process_does(tmp_path: Path) -> None:
    """By head: with small budgets, and with what stands for the rest, seeded by head too."""
    pytest.importorskip("accelerate", reason="transformers spreads a model with accelerate")
    MODELS["llama"].build().save_pretrained(tmp_path / "model")
    (expected,) = results(tmp_path / "model", tmp_path / "out", 1)
    kinds = {found.numpy().tobytes() for found in expected.values()}
    assert len(kinds) > 2, "all variants say the same, so that none of them is told apart"
    for found in results(tmp_path / "model", tmp_path / "out", RANKS):
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
