"""Bars move while a prompt is read, change nothing, and are shown where transformers' are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.utils import logging

from hf_kvret import attach
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.program import progress
from hf_kvret.lab.program.program import Parser, run_program
from hf_kvret.testing import MODELS


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether transformers shows its bars, as its own functions set it."""
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if request.param else logging.disable_progress_bar)()
    yield request.param
    (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def count(name: str) -> None:
    """Three steps of a bar, a part of one, and a line of text beside it."""
    for _ in progress.tqdm(range(3), desc=name):
        pass
    with progress.tqdm(total=2, desc=name) as bar:
        bar.set_postfix_str("half")
        bar.update(2 - bar.n)
    progress.tqdm.write("a line")


def test_bars_are_shown_where_those_of_transformers_are(
    enabled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    count("steps")
    shown = capsys.readouterr()
    assert ("steps: 100%" in shown.err) == enabled and shown.out == "a line\n"
    assert enabled or not shown.err
    list(progress.tqdm(range(3), disable=True))
    assert not capsys.readouterr().err


def test_a_program_shows_its_own_bars_and_none_of_transformers(
    enabled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(options: argparse.Namespace) -> int:
        list(logging.tqdm(range(3), desc="theirs"))
        with progress.only_our_bars():
            count("ours")
        count("again")
        return 0

    parser = Parser()
    parser.set_defaults(run=work)
    assert run_program(parser, [], lambda options: "") == 0
    shown = capsys.readouterr().err
    assert "theirs" not in shown
    assert [f"{name}: 100%" in shown for name in ("ours", "again")] == [enabled] * 2
    assert logging.is_progress_bar_enabled() == enabled


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_prompt_moves_its_bar_part_by_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[float] = []

    class Bar(progress.tqdm):
        def update(self, n: Any = 1) -> Any:
            places.append(self.n + n)
            return super().update(n)

    monkeypatch.setattr(progress, "tqdm", Bar)
    model = MODELS[name].build()
    attach(model)
    tokens = torch.arange(3, 63)
    plain = Reader(model, choose_cache("flat"), 64)
    expected = plain.feed(tokens)
    reader = Reader(model, choose_cache("flat"), 64)
    assert torch.equal(reader.prefill(tokens), expected)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    assert len(places) >= 2 * layers
    assert places == sorted(places) and places[-1] == pytest.approx(60)
    # Hooks are gone: another pass moves nothing.
    moved = len(places)
    reader.feed(tokens[:1])
    assert len(places) == moved
