"""The command line: help, versions, errors in one line, its start, and Ctrl-C."""

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

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


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
# Defaults that are long lists, in a word.
IN_A_WORD = {"--tasks": "all", "--variants": "all"}


@pytest.mark.parametrize("words", PARSERS, ids=lambda words: " ".join(words) or "hf-kvret")
def test_help_is_written_for_users_and_tells_every_default(words: tuple[str, ...]) -> None:
    parser = PARSERS[words]
    assert parser.description and "\n" not in parser.description
    for mark in ("``", "Args:", "Attributes:", "Raises:", "Returns:"):
        assert mark not in parser.format_help()
    formatter = parser.formatter_class(prog="hf-kvret")
    assert shown_default(2 * 10**9) == "2GB"
    for action in parser._actions:
        if action.nargs == 0 or not action.option_strings:
            continue
        assert action.help, action.option_strings
        shown = formatter._expand_help(action)
        assert shown.count("default: ") <= 1, action.option_strings
        if action.default is not None:
            word = IN_A_WORD.get(action.option_strings[0])
            typed = shown_default(action.default)
            assert f"(default: {typed})" in shown or (word and f"default: {word}" in shown), shown
            assert callable(action.type) is False or action.type(typed) == action.default, shown


@pytest.mark.parametrize("words", [("demo",), ("bench", "decode")])
def test_an_unknown_option_prints_the_usage_of_its_command(
    words: tuple[str, ...], capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        PARSER.parse_args([*words, "--nonsense", "1"])
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(PARSERS[words].format_usage())
    assert "unrecognized arguments: --nonsense" in shown


def test_version_names_the_packages_and_the_kernels(program: Any) -> None:
    output = program("--version").out
    for version in (hf_kvret.__version__, torch.__version__, transformers.__version__):
        assert version in output
    assert f"CPU kernels: {why_not() or ', '.join(paths())}" in " ".join(output.split())


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("header too large"),
        torch.OutOfMemoryError("tried to allocate\n too much"),
        ValueError("several\nlines"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_mistake_ends_in_a_trace(error: Exception, monkeypatch: Patch, program: Any) -> None:
    def fail(*args: object) -> int:
        raise error

    monkeypatch.setattr(measurement, "run_measurement", fail)
    (line,) = program("demo", status=2).err.splitlines()
    assert line.startswith("hf-kvret: error: ") and len(line) > len("hf-kvret: error: ")


def test_a_device_is_a_cpu_or_a_gpu_that_is_there(monkeypatch: Patch, program: Any) -> None:
    for device in ("cpu", "cuda", "cuda:1"):
        assert device_name(device) == device
    for count, says in ((0, "no CUDA device here"), (2, "the last CUDA device here is cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        (line,) = program("demo", "--device", "cuda:7", status=2).err.splitlines()
        assert f"--device cuda:7: {says}" in line
    line = program("demo", "--device", "mps", status=2).err.splitlines()[-1]
    assert "write cpu, cuda, or one of several as cuda:1" in line


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(measurement, "measure", lambda *a: pytest.fail("the demo ran first"))
    assert main(["demo", "--plot", "x.png"]) == 2


PROGRAM = "import sys\nfrom hf_kvret_cli import main\nsys.exit(main())\n"


def run_apart(words: list[str], folder: Path, torch: str, program: str = PROGRAM) -> Any:
    """The program, or another one, in a process of its own, with a module ``torch`` of ours."""
    (folder / "torch.py").write_text(torch)
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["wrong"]], ids=lambda words: " ".join(words))
def test_help_and_wrong_commands_need_no_torch_and_are_the_whole_programs(
    words: list[str], monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    # Lines are as wide as the terminal.
    monkeypatch.setenv("COLUMNS", "80")
    done = run_apart(words, tmp_path, "raise SystemExit('torch was imported')")
    with pytest.raises(SystemExit) as stopped:
        main(words)
    shown = capsys.readouterr()
    assert (done.returncode, done.stdout, done.stderr) == (stopped.value.code, shown.out, shown.err)
    assert done.stdout or done.returncode == 2


def test_every_command_is_known_by_its_help() -> None:
    parser = hf_kvret_cli.make_parser()
    assert [*dict(parsers(parser))] == [words for words in PARSERS if len(words) < 2]
    assert parser.format_help() == PARSER.format_help()


# Instead of torch: the first heavy import of the package.
CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"


@pytest.mark.parametrize(
    ("torch", "status", "shown"),
    [(CTRL_C, 130, "\nhf-kvret: interrupted\n"), ("raise SystemExit(7)", 7, "")],
    ids=["ctrl-c", "exit"],
)
def test_a_line_comes_before_torch_does_and_ctrl_c_is_one_more(
    torch: str, status: int, shown: str, tmp_path: Path
) -> None:
    result = run_apart(["--version"], tmp_path, torch)
    assert result.stderr == f"hf-kvret: loading ...\n{shown}"
    assert (result.returncode, result.stdout) == (status, "")


def test_importing_the_library_prints_nothing_and_keeps_ctrl_c(tmp_path: Path) -> None:
    handler = "signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    torch = f"import signal\nraise SystemExit(7 if {handler} else 8)\n"
    program = "import sys\nsys.argv[0] = 'hf-kvret'\nimport hf_kvret"
    result = run_apart([], tmp_path, torch, program)
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")


GOES_ON = ": the same command goes on where it stopped"
NOTHING = ", and nothing is kept: with --json FILE the same command goes on"
MEASURE = "hf_kvret.lab.evaluate.measurement.run_measurement"
CALIBRATE = "hf_kvret.lab.calibrate.command.run_calibrate"


@pytest.mark.parametrize(
    ("command", "work", "shown"),
    [
        ("eval niah --json OUT/a.json", MEASURE, GOES_ON),
        ("eval niah", MEASURE, NOTHING),
        ("eval niah", "hf_kvret.cli.make_parser", ""),
        ("calibrate a2ats --model needle --out OUT", CALIBRATE, ""),
    ],
)
def test_ctrl_c_in_a_command_is_one_line_that_says_what_is_kept(
    command: str, work: str, shown: str, monkeypatch: Patch, capsys: Capture, tmp_path: Path
) -> None:
    def stop(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(work, stop)
    words = command.replace("OUT", str(tmp_path)).split()
    monkeypatch.setattr(sys, "argv", ["hf-kvret", *words])
    assert main() == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"hf-kvret: interrupted{shown}"
