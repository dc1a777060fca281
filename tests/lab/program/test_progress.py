"""Bars are shown where transformers shows its own."""

import argparse
from collections.abc import Iterator

import pytest
from transformers.utils import logging

from hf_kvret.lab.program import progress
from hf_kvret.lab.program.program import Parser, run_program


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


def test_a_program_shows_its_own_bars_and_none_of_transformers(
    enabled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(options: argparse.Namespace) -> int:
        list(logging.tqdm(range(3), desc="theirs"))
        with progress.only_our_bars():
            count("ours")
        count("again")
        list(progress.tqdm(range(3), desc="never", disable=True))
        return 0

    parser = Parser()
    parser.set_defaults(run=work)
    assert run_program(lambda: parser, [], lambda options: "") == 0
    shown, lines = capsys.readouterr()[::-1]
    assert "theirs" not in shown and "never" not in shown and lines == 2 * "a line\n"
    assert [f"{name}: 100%" in shown for name in ("ours", "again")] == [enabled] * 2
    assert enabled or not shown
    assert logging.is_progress_bar_enabled() == enabled
