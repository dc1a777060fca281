"""The whole command line: every help text, every number, the versions, and errors in one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
import torch
import transformers
from safetensors import SafetensorError

import hf_kvret
from hf_kvret.cli import main, make_parser


def parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every parser of the program, with the words that lead to it."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from parsers(child, (*words, name))


PARSERS = dict(parsers(make_parser()))
OPTIONS = [
    pytest.param(words, action, id=" ".join([*words, action.option_strings[-1]]))
    for words, parser in PARSERS.items()
    for action in parser._actions
    if action.option_strings and action.nargs != 0
]
ids = [" ".join(words) or "hf-kvret" for words in PARSERS]


@pytest.mark.parametrize(("words", "action"), OPTIONS)
def test_every_option_says_what_it_is_and_its_default(
    words: tuple[str, ...], action: argparse.Action
) -> None:
    formatter = PARSERS[words].formatter_class(prog="hf-kvret")
    assert action.help, "no help"
    shown = formatter._expand_help(action)
    if action.default is not None:
        assert "default" in shown
    assert "``" not in shown


@pytest.mark.parametrize("parser", PARSERS.values(), ids=ids)
def test_help_is_written_for_users(parser: argparse.ArgumentParser) -> None:
    shown = parser.format_help()
    for mark in ("``", "Args:", "Attributes:", "Raises:", "Returns:"):
        assert mark not in shown
    assert parser.description and "\n" not in parser.description


def test_defaults_are_shown_as_they_are_typed() -> None:
    shown = PARSERS["eval", "niah"].format_help()
    assert "(default: 2K,4K,8K,16K)" in shown
    assert "0,10,20,30,40,50,60,70,80,90,100)" in shown
    assert "examples:\n  hf-kvret eval niah --lengths" in shown
    assert "(default: 16K)" in PARSERS["demo",].format_help()


def test_versions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    for version in (hf_kvret.__version__, torch.__version__, transformers.__version__):
        assert version in told


# What a command needs besides the option under test.
REQUIRED = {
    "--text": "novel.txt",
    "--model": "needle",
    "--out": "artifact",
    "--data": "data.zip",
    "--hub-id": None,
}
# `fixed` would be taken for another option's mistake: these are checked with others.
NUMBERS = [
    pytest.param(words, action, id=" ".join([*words, action.option_strings[-1]]))
    for words, parser in PARSERS.items()
    for action in parser._actions
    if action.option_strings
    and action.nargs != 0
    and (
        action.type in (int, float)
        or isinstance(action.default, int | float)
        or getattr(action.type, "__module__", "") == "hf_kvret.evaluation.arguments"
    )
    and action.option_strings[-1] not in ("--device", "--json", "--plot", "--table", "--out")
    and getattr(action.type, "__name__", "") not in ("file_path", "names")
]


def _command(words: tuple[str, ...], option: str, value: str, folder: str) -> list[str]:
    """The command with the option, and with what else it can't do without."""
    command = list(words)
    for action in PARSERS[words]._actions:
        for name, needed in REQUIRED.items():
            if name in action.option_strings and needed is not None and name != option:
                command += [name, needed if name == "--model" else f"{folder}/{needed}"]
    return [*command, option, value]


@pytest.mark.parametrize(("words", "action"), NUMBERS)
@pytest.mark.parametrize("value", ["-1", "nan", "x"])
def test_a_bad_number_is_refused_by_the_name_of_its_option(
    words: tuple[str, ...],
    action: argparse.Action,
    value: str,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "numbers"
    folder.mkdir(exist_ok=True)
    (folder / "novel.txt").write_text("The grass is green. " * 200)
    for module in ("evaluation.command", "calibration.command", "benchmark.index_build_source"):
        monkeypatch.setattr(f"hf_kvret.{module}.load_subject", _begun)
    monkeypatch.setattr("hf_kvret.evaluation.demo_command.load_bundled_model", _begun)
    monkeypatch.setattr("hf_kvret.benchmark.command._prepare", _begun)
    option = action.option_strings[-1]
    try:
        status = main(_command(words, option, value, str(folder)))
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2
    assert option in error.splitlines()[-1]


def _begun(*given: object) -> None:
    pytest.fail("work has begun")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "x.json"),
        SafetensorError("header too large"),
        RecursionError("maximum recursion depth exceeded"),
        MemoryError(),
        torch.OutOfMemoryError("tried to allocate\n too much"),
        ValueError("several\nlines"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_mistake_ends_in_a_trace(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("hf_kvret.evaluation.demo_command.run_demo_command", fail)
    assert main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-kvret: error: ") and len(line) > len("hf-kvret: error: ")
