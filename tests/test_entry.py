"""What ``hf-kvret`` says before torch is loaded: the same as the whole parser, and at once."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

import hf_kvret_cli
from hf_kvret import cli

# These end without torch, and the whole program says the same.
QUICK = [[], ["--help"], ["-h"], ["wrong"], ["wrong", "--help"]]


def ids(words: list[str]) -> str:
    return " ".join(words) or "nothing"


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, which names torch on stderr if it was imported."""
    program = (
        "import atexit, sys\n"
        "atexit.register(lambda: 'torch' in sys.modules and print('TORCH', file=sys.stderr))\n"
        "from hf_kvret_cli import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("words", QUICK, ids=ids)
def test_help_and_wrong_commands_need_no_torch_and_are_the_whole_programs(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Lines are as wide as the terminal.
    monkeypatch.setenv("COLUMNS", "80")
    done = run(words)
    assert "TORCH" not in done.stderr and "loading" not in done.stderr
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    shown = capsys.readouterr()
    assert (done.returncode, done.stdout, done.stderr) == (
        stopped.value.code,
        shown.out,
        shown.err,
    )
    assert done.stdout or done.returncode == 2


def test_a_command_is_run_by_the_whole_program() -> None:
    done = run(["fits", "--nonsense"])
    assert done.returncode == 2
    assert "TORCH" in done.stderr and "usage: hf-kvret fits" in done.stderr


def test_every_command_is_known_by_its_help() -> None:
    quick, whole = hf_kvret_cli.make_parser(), cli.make_parser()
    assert list(_commands(quick)) == list(_commands(whole))
    assert quick.format_help() == whole.format_help()


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [commands] = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return commands.choices
