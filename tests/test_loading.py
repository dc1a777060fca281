"""What a user sees while torch loads: one line, and one more after Ctrl-C; others see nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "import sys\nfrom hf_kvret_cli import main\nsys.exit(main())\n"
# Instead of torch: the first heavy import of the package.
CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"
STARTS = ["script", "hf_kvret", "hf_kvret.cli"]


def start(how: str, folder: Path, torch: str | None = None) -> subprocess.CompletedProcess[str]:
    """``hf-kvret --version`` with a module ``torch`` of our own; ``how`` is one of ``STARTS``."""
    script = folder / "hf-kvret"
    script.write_text(SCRIPT)
    command = [str(script)] if how == "script" else ["-m", how]
    return run([*command, "--version"], folder, torch)


def run(arguments: list[str], folder: Path, torch: str | None) -> subprocess.CompletedProcess[str]:
    """Python with these arguments."""
    stubs = folder / "stubs"
    stubs.mkdir()
    if torch is not None:
        (stubs / "torch.py").write_text(torch)
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(stubs)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("how", STARTS)
def test_ctrl_c_while_loading_is_one_line(how: str, tmp_path: Path) -> None:
    done = start(how, tmp_path, CTRL_C)
    assert done.stderr == "hf-kvret: loading ...\n\nhf-kvret: interrupted\n"
    assert (done.returncode, done.stdout) == (130, "")


@pytest.mark.parametrize("how", STARTS)
def test_the_line_comes_before_torch_does(how: str, tmp_path: Path) -> None:
    done = start(how, tmp_path, "raise SystemExit(7)")
    assert (done.returncode, done.stderr) == (7, "hf-kvret: loading ...\n")


def test_the_line_is_said_once(tmp_path: Path) -> None:
    done = start("hf_kvret", tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("hf-kvret ")
    assert done.stderr.count("loading") == 1


def test_ctrl_c_is_the_commands_again_once_it_runs(tmp_path: Path) -> None:
    program = (
        "import signal, sys\nsys.argv[0] = 'hf-kvret'\nfrom hf_kvret import cli\n"
        "import hf_kvret.lab.evaluate.measurement as measurement\n"
        "measurement.run_measurement = lambda *given: signal.raise_signal(signal.SIGINT)\n"
        "sys.argv[1:] = ['demo']\nsys.exit(cli.main())\n"
    )
    done = run(["-c", program], tmp_path, None)
    assert done.returncode == 130
    assert done.stderr.startswith("hf-kvret: loading ...\n\nhf-kvret: interrupted, and nothing")


def test_other_programs_hear_nothing_and_keep_their_ctrl_c(tmp_path: Path) -> None:
    told = "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    done = run(["-c", "import hf_kvret"], tmp_path, told + "raise SystemExit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
