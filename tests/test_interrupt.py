"""Ctrl-C in a command: one line that says what is kept, status 130, no trace."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_kvret.cli import main
from hf_kvret.lab.calibrate.runner import calibrate

GOES_ON = "hf-kvret: interrupted: the same command goes on where it stopped"
# A shell that starts the tests in the background has Ctrl-C ignored, which children inherit.
PROGRAM = """
import signal, sys
from hf_kvret.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""


def interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, *command: str
) -> str:
    """The last line of stderr when ``where`` is interrupted in ``hf-kvret <command>``."""

    def stop(*given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, stop)
    monkeypatch.setattr(sys, "argv", ["hf-kvret", *command])
    assert main() == 130
    return capsys.readouterr().err.splitlines()[-1]


def test_a_real_signal_ends_a_calibration_with_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["calibrate", "a2ats", "--model", "needle", "--out", str(out), "--tokens", "8K"]
    # The layers after the first would take minutes.
    more = ["--length", "1K", "--codewords", "512", "--rounds", "100000", "--layers-at-once", "1"]
    command = [sys.executable, "-c", PROGRAM, *arguments, *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not (out / ".parts" / "setup.sha256").is_file():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, shown = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert shown.splitlines()[-1] == GOES_ON
    assert "Traceback" not in shown


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
    (tmp_path / ".parts").mkdir()
    assert interrupted(monkeypatch, capsys, where, *command) == GOES_ON


def test_callers_in_python_get_the_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"hf_kvret.lab.calibrate.command.{calibrate.__name__}", stop)
    command = ["calibrate", "a2ats", "--model", "needle", "--out", str(tmp_path / "out")]
    with pytest.raises(KeyboardInterrupt):
        main([*command, "--tokens", "256", "--length", "128"])
