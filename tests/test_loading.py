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


def start(folder: Path, torch: str | None = None) -> subprocess.CompletedProcess[str]:
    """``hf-kvret --version`` with a module ``torch`` of our own."""
    script = folder / "hf-kvret"
    script.write_text(SCRIPT)
    return run([str(script), "--version"], folder, torch)


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


def test_ctrl_c_while_loading_is_one_line(tmp_path: Path) -> None:
    result = start(tmp_path, CTRL_C)
    assert result.stderr == "hf-kvret: loading ...\n\nhf-kvret: interrupted\n"
    assert (result.returncode, result.stdout) == (130, "")


def test_the_line_comes_before_torch_does(tmp_path: Path) -> None:
    result = start(tmp_path, "raise SystemExit(7)")
    assert (result.returncode, result.stderr) == (7, "hf-kvret: loading ...\n")


def test_the_line_is_printed_once(tmp_path: Path) -> None:
    result = start(tmp_path)
    assert result.returncode == 0 and result.stdout.startswith("hf-kvret ")
    assert result.stderr.count("loading") == 1


def test_ctrl_c_is_the_commands_again_once_it_runs(tmp_path: Path) -> None:
    program = (
        "import signal, sys\nfrom hf_kvret import cli\n"
        "import hf_kvret.lab.evaluate.measurement as measurement\n"
        "measurement.run_measurement = lambda *given: signal.raise_signal(signal.SIGINT)\n"
        "from hf_kvret_cli import main\n"
        "sys.argv = ['hf-kvret', 'demo']\nsys.exit(main())\n"
    )
    result = run(["-c", program], tmp_path, None)
    assert result.returncode == 130
    assert result.stderr.startswith("hf-kvret: loading ...\n\nhf-kvret: interrupted, and nothing")


@pytest.mark.parametrize("name", ["hf-kvret", "program"])
def test_importing_the_library_prints_nothing_and_keeps_ctrl_c(name: str, tmp_path: Path) -> None:
    """Whatever the program is called."""
    check = "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    program = f"import sys\nsys.argv[0] = {name!r}\nimport hf_kvret"
    result = run(["-c", program], tmp_path, check + "raise SystemExit(7)")
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")
