"""The bench command as its own small program, and the models it measures in tests."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_kvret.lab.bench import timing
from hf_kvret.lab.bench.parser import add_bench_parser
from hf_kvret.lab.bench.shapes import load_shape


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth over 4 MiB: quick, and nothing here looks at how true it is."""
    monkeypatch.setattr(timing, "_CPU_BYTES", 1 << 22)


@pytest.fixture
def bench() -> Callable[..., int]:
    """``bench("decode", "--context", "1K")`` runs the command and returns its exit status."""

    def run(*arguments: str) -> int:
        parser = argparse.ArgumentParser()
        add_bench_parser(parser.add_subparsers(required=True))
        more = [] if "--device" in arguments else ["--device", "cpu"]
        options = parser.parse_args(["bench", *arguments, *more])
        return options.run(options)

    return run


@pytest.fixture
def refused(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """As ``bench`` for arguments that are refused; returns what is said of them."""

    def run(*arguments: str) -> str:
        with pytest.raises((SystemExit, ValueError, ModuleNotFoundError)) as caught:
            bench(*arguments)
        return capsys.readouterr().err if caught.type is SystemExit else str(caught.value)

    return run


@pytest.fixture
def six_layers(tmp_path: Path) -> Path:
    """A folder with the config.json of a tiny model of six layers."""
    folder = tmp_path / "six-layers"
    config = load_shape("tiny").config
    config.num_hidden_layers = 6
    config.save_pretrained(folder)
    return folder
