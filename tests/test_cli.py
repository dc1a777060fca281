"""The command line: help, numbers, versions, errors in one line, its start, and Ctrl-C."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError

import hf_kvret
import hf_kvret_cli
from hf_kvret.cli import main, make_parser
from hf_kvret.lab.evaluate import measurement
from hf_kvret.lab.program.arguments import device_name
from hf_kvret.lab.program.program import shown_default
from hf_kvret_kernels.host_library import paths, why_not


def parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every parser of the program, with the words that lead to it."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
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


def test_version_names_the_packages_and_the_kernels(program: Any) -> None:
    output = program("--version").out
    for version in (hf_kvret.__version__, torch.__version__, transformers.__version__):
        assert version in output
    assert f"CPU kernels: {why_not() or ', '.join(paths())}" in " ".join(output.split())


# What a command needs besides the option under test.
REQUIRED = {
    "--text": "novel.txt",
    "--model": "needle",
    "--out": "artifact",
    "--data": "data.zip",
}


def _command(words: tuple[str, ...], option: str, value: str, folder: str) -> list[str]:
    """The command with the option, and with what else it can't do without."""
    command = list(words)
    for action in PARSERS[words]._actions:
        if not action.option_strings and action.nargs is None:
            command.append(next(iter(action.choices or ()), f"{folder}/novel.txt"))
        for name, needed in REQUIRED.items():
            if name in action.option_strings and name != option:
                command += [name, needed if name == "--model" else f"{folder}/{needed}"]
    return [*command, option, value]


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
    error: Exception, monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    def fail(*args: object) -> int:
        raise error

    monkeypatch.setattr("hf_kvret.lab.evaluate.measurement.run_measurement", fail)
    (line,) = program("demo", status=2).err.splitlines()
    assert line.startswith("hf-kvret: error: ") and len(line) > len("hf-kvret: error: ")


def test_a_device_is_a_cpu_or_a_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    for device in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert device_name(device) == device
    for count, says in ((0, "no CUDA device here"), (2, "the last CUDA device here is cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        (line,) = program("demo", "--device", "cuda:7", status=2).err.splitlines()
        assert f"--device cuda:7: {says}" in line
    line = program("demo", "--device", "mps", status=2).err.splitlines()[-1]
    assert "write cpu, cuda, or one of several as cuda:1" in line


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(measurement, "measure", lambda *a: pytest.fail("the demo ran first"))
    assert main(["demo", "--plot", "x.png"]) == 2


# These end without torch, and the whole program says the same.
QUICK = [[], ["--help"], ["-h"], ["wrong"], ["wrong", "--help"]]


def label(words: list[str]) -> str:
    return " ".join(words) or "nothing"


def run_apart(words: list[str]) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, which names torch on stderr if it was imported."""
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: 'torch' in sys.modules and print('TORCH', file=sys.stderr))\n"
        "from hf_kvret_cli import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("words", QUICK, ids=label)
def test_help_and_wrong_commands_need_no_torch_and_are_the_whole_programs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Lines are as wide as the terminal.
    monkeypatch.setenv("COLUMNS", "80")
    done = run_apart(words)
    assert "TORCH" not in done.stderr and "loading" not in done.stderr
    with pytest.raises(SystemExit) as stopped:
        main(words)
    shown = capsys.readouterr()
    assert (done.returncode, done.stdout, done.stderr) == (
        stopped.value.code,
        shown.out,
        shown.err,
    )
    assert done.stdout or done.returncode == 2


@pytest.mark.slow
def test_a_command_is_run_by_the_whole_program() -> None:
    done = run_apart(["fits", "--nonsense"])
    assert done.returncode == 2
    assert "TORCH" in done.stderr and "usage: hf-kvret fits" in done.stderr
    assert done.stderr.count("loading") == 1


def test_every_command_is_known_by_its_help() -> None:
    parser = hf_kvret_cli.make_parser()
    assert [*dict(parsers(parser))] == [words for words in PARSERS if len(words) < 2]
    assert parser.format_help() == PARSER.format_help()


# While torch loads: one line, and one more after Ctrl-C; others see nothing.

START = "import sys\nfrom hf_kvret_cli import main\nsys.argv[1:] = {words}\nsys.exit(main())\n"
# Instead of torch: the first heavy import of the package.
CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"


def run_stubbed(
    program: str, folder: Path, torch: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, with a module ``torch`` of ours if it is given."""
    if torch is not None:
        (folder / "torch.py").write_text(torch)
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("torch", "status", "shown"),
    [(CTRL_C, 130, "\nhf-kvret: interrupted\n"), ("raise SystemExit(7)", 7, "")],
    ids=["ctrl-c", "exit"],
)
def test_a_line_comes_before_torch_does_and_ctrl_c_is_one_more(
    torch: str, status: int, shown: str, tmp_path: Path
) -> None:
    result = run_stubbed(START.format(words=["--version"]), tmp_path, torch)
    assert result.stderr == f"hf-kvret: loading ...\n{shown}"
    assert (result.returncode, result.stdout) == (status, "")


@pytest.mark.slow
def test_ctrl_c_is_the_commands_again_once_it_runs(tmp_path: Path) -> None:
    program = (
        "import signal\nfrom hf_kvret import cli\n"
        "import hf_kvret.lab.evaluate.measurement as measurement\n"
        "measurement.run_measurement = lambda *given: signal.raise_signal(signal.SIGINT)\n"
    )
    result = run_stubbed(program + START.format(words=["demo"]), tmp_path)
    assert result.returncode == 130
    assert "hf-kvret: loading ...\n\nhf-kvret: interrupted, and nothing" in result.stderr


@pytest.mark.parametrize("name", ["hf-kvret", "program"])
def test_importing_the_library_prints_nothing_and_keeps_ctrl_c(name: str, tmp_path: Path) -> None:
    """Whatever the program is called."""
    check = "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    program = f"import sys\nsys.argv[0] = {name!r}\nimport hf_kvret"
    result = run_stubbed(program, tmp_path, check + "raise SystemExit(7)")
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")


# Ctrl-C in a command: one line that says what is kept, status 130, no trace.

GOES_ON = "hf-kvret: interrupted: the same command goes on where it stopped"


def interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, *command: str
) -> str:
    """The last line of stderr when ``where`` is interrupted in ``hf-kvret <command>``."""

    def stop(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, stop)
    monkeypatch.setattr(sys, "argv", ["hf-kvret", *command])
    assert main() == 130
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["demo", "eval niah", "bench decode"])
def test_a_measurement_with_a_result_file_goes_on(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    where = "hf_kvret.lab.evaluate.measurement.run_measurement"
    file = ["--json", str(tmp_path / "a.json")]
    assert interrupted(monkeypatch, capsys, where, *command.split(), *file) == GOES_ON
    without = interrupted(monkeypatch, capsys, where, *command.split())
    assert without.endswith(
        "interrupted, and nothing is kept: with --json FILE the same command goes on"
    )


def test_where_nothing_was_begun_nothing_is_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = "hf_kvret.lab.calibrate.command.run_calibrate"
    command = ["calibrate", "a2ats", "--model", "needle", "--out", str(tmp_path)]
    assert interrupted(monkeypatch, capsys, where, *command) == "hf-kvret: interrupted"
