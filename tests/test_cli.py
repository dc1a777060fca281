"""The whole command line: every help text, every number, the versions, and errors in one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError

import hf_kvret
from hf_kvret.cli import main, make_parser
from hf_kvret.lab.program.arguments import check_device, device_name, file_path, names
from hf_kvret.lab.program.help_text import shown_default
from hf_kvret_kernels.host_attention import paths, why_not


def parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every parser of the program, with the words that lead to it."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                if child.prefix_chars == "\0":
                    # The name of a script, which takes whatever is given.
                    continue
                yield from parsers(child, (*words, name))


PARSER = make_parser()
PARSERS = dict(parsers(PARSER))
WORDS = [pytest.param(words, id=" ".join(words) or "hf-kvret") for words in PARSERS]


def options(words: tuple[str, ...]) -> list[argparse.Action]:
    """The options of a command that take a value."""
    actions = PARSERS[words]._actions
    return [action for action in actions if action.option_strings and action.nargs != 0]


# Defaults that are long lists, in a word.
IN_A_WORD = {"--ops": "all", "--parts": "all", "--tasks": "all", "--variants": "all"}


@pytest.mark.parametrize("words", WORDS)
def test_every_option_says_what_it_is_and_its_default(words: tuple[str, ...]) -> None:
    formatter = PARSERS[words].formatter_class(prog="hf-kvret")
    for action in options(words):
        assert action.help, action.option_strings
        shown = formatter._expand_help(action)
        assert shown.count("default: ") <= 1, action.option_strings
        if action.default is None:
            continue
        word = IN_A_WORD.get(action.option_strings[0])
        default = f"(default: {shown_default(action.default)})"
        assert default in shown or (word and f"default: {word}" in shown), shown


@pytest.mark.parametrize("words", WORDS)
def test_help_is_written_for_users(words: tuple[str, ...]) -> None:
    parser = PARSERS[words]
    shown = parser.format_help()
    for mark in ("``", "Args:", "Attributes:", "Raises:", "Returns:"):
        assert mark not in shown
    assert parser.description and "\n" not in parser.description


def test_defaults_are_shown_as_they_are_typed() -> None:
    shown = PARSERS["eval", "niah"].format_help()
    assert "(default: 2K,4K,8K,16K)" in shown
    assert "0,10,20,30,40,50,60,70,80,90,100)" in shown
    assert "examples:\n  hf-kvret eval niah --context" in shown
    assert "default: 64K" in " ".join(PARSERS["calibrate", "a2ats"].format_help().split())


@pytest.mark.parametrize("words", WORDS)
def test_an_unknown_option_prints_the_usage_of_its_command(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A command that lacks its own sub-command says that first, with the same usage.
    with pytest.raises(SystemExit) as stopped:
        PARSER.parse_args(_command(words, "--nonsense", "1", str(tmp_path)))
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(PARSERS[words].format_usage())
    has_commands = any(
        isinstance(action, argparse._SubParsersAction) for action in PARSERS[words]._actions
    )
    assert has_commands or "unrecognized arguments: --nonsense" in shown


def test_versions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    for version in (hf_kvret.__version__, torch.__version__, transformers.__version__):
        assert version in told
    assert f"CPU kernels: {why_not() or ', '.join(paths())}" in " ".join(told.split())


# What a command needs besides the option under test.
REQUIRED = {
    "--text": "novel.txt",
    "--model": "needle",
    "--out": "artifact",
    "--data": "data.zip",
}


def numbers(words: tuple[str, ...]) -> list[argparse.Action]:
    """The options of a command that read a number, by a type of Python or by one of ours."""
    ours = "hf_kvret.lab.program.arguments"
    return [
        action
        for action in options(words)
        if action.type in (int, float)
        or isinstance(action.default, int | float)
        or (
            getattr(action.type, "__module__", "") == ours
            and action.type not in (file_path, names, device_name)
        )
    ]


def _command(words: tuple[str, ...], option: str, value: str, folder: str) -> list[str]:
    """The command with the option, and with what else it can't do without."""
    command = list(words)
    for action in PARSERS[words]._actions:
        for name, needed in REQUIRED.items():
            if name in action.option_strings and name != option:
                command += [name, needed if name == "--model" else f"{folder}/{needed}"]
    return [*command, option, value]


@pytest.mark.parametrize("words", WORDS)
def test_a_bad_number_is_refused_by_the_name_of_its_option(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "novel.txt").write_text("The grass is green. " * 200)
    monkeypatch.setattr("hf_kvret.cli.make_parser", lambda: PARSER)
    for module in ("lab.evaluate.task", "lab.calibrate.command"):
        monkeypatch.setattr(f"hf_kvret.{module}.load_subject", _begun)
    monkeypatch.setattr("hf_kvret.lab.evaluate.demo.load_bundled_model", _begun)
    monkeypatch.setattr("hf_kvret.lab.bench.model_measurement.random_model", _begun)
    for action in numbers(words):
        option = action.option_strings[0]
        for value in ("-1", "nan", "x"):
            try:
                status = main(_command(words, option, value, str(tmp_path)))
            except SystemExit as stopped:
                status = stopped.code
            assert status == 2
            assert option in capsys.readouterr().err.splitlines()[-1]


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
    def fail(*given: object) -> int:
        raise error

    monkeypatch.setattr("hf_kvret.lab.evaluate.measurement.run_measurement", fail)
    assert main(["demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-kvret: error: ") and len(line) > len("hf-kvret: error: ")


@pytest.mark.parametrize(
    "device", ["meta", "mps", "xpu", "cpu:0", "cuda:", "cuda:²", "cuda:-1", "cuda:999", "gpu", ""]
)
def test_a_device_that_nothing_here_runs_on_is_refused(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--device", device])
    assert stopped.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--device" in line and "write cpu, cuda, or one of several as cuda:1" in line


def test_a_gpu_must_be_one_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert device_name(device) == device
        check_device(device)
    assert main(["demo", "--device", "cuda:7"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--device cuda:7: 2 CUDA devices here, numbered from 0; use --device cuda:0" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda:0: no CUDA device here"):
        check_device("cuda:0")


@pytest.mark.parametrize(
    "words",
    [
        words
        for words in PARSERS
        if words and any("--limit" in a.option_strings for a in options(words))
    ],
)
def test_no_limit_is_a_limit_of_infinity(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert PARSER.parse_args([*words, "--limit", "inf"]).limit == math.inf
    for value in ("0", "-1", "nan", "-inf", "x"):
        with pytest.raises(SystemExit):
            PARSER.parse_args([*words, f"--limit={value}"])
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"--limit: {value!r} is no number of seconds above 0" in line


def test_a_wrong_batch_is_told_what_a_batch_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "decode", "--batch", "0"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("argument --batch: '0' is no whole number from 1: write 1 or 1,8")
