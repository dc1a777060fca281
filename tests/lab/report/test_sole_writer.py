"""One writer of a file of results: a second one is refused, a killed one is in nobody's way."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hf_kvret.lab.report.results import sole_writer

pytest.importorskip("fcntl", reason="no such locks here")
MESSAGE = r"another process writes its results to .*cells\.json.*give another file or folder"


def hold(path: Path, connection: Connection) -> None:
    """Write results until the connection says to stop."""
    with sole_writer(path):
        connection.send("writing")
        connection.recv()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cells.json"


def test_a_second_writer_is_refused_until_the_first_has_ended(path: Path) -> None:
    with sole_writer(path):
        with pytest.raises(ValueError, match=MESSAGE), sole_writer(path):
            pass
        with sole_writer(path.with_name("other.json")):
            pass
        with pytest.raises(ValueError, match=MESSAGE), sole_writer(path):
            pass
    with sole_writer(path):
        pass
    assert list(path.parent.iterdir()) == []


def test_a_run_that_broke_off_lets_go(path: Path) -> None:
    with pytest.raises(KeyError), sole_writer(path):
        raise KeyError
    with sole_writer(path):
        pass


def test_a_killed_process_lets_go(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=hold, args=(path, theirs))
    process.start()
    assert mine.poll(120) and mine.recv() == "writing"
    with pytest.raises(ValueError, match=MESSAGE), sole_writer(path):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert list(path.parent.iterdir()), "its file is still there"
    with sole_writer(path):
        pass
    assert list(path.parent.iterdir()) == []


def test_results_in_memory_have_any_number_of_writers() -> None:
    with sole_writer(None), sole_writer(None):
        pass
