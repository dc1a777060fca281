"""Without a network every command that is given a hub id says so at once."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hf_kvret.lab.program import hub_access
from hf_kvret.lab.program.hub_access import needs_cache, why_unreachable


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An endpoint where nobody listens; nothing is in the cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return url


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("eval ppl --text {text} --model nobody/none", "--model nobody/none"),
        ("bench decode --shape nobody/none", "--shape nobody/none"),
        ("calibrate a2ats --text {text} --out {out} --model nobody/none", "--model nobody/none"),
        ("calibrate a2ats --model needle --out {out} --push-to-hub me/x", "--push-to-hub me/x"),
    ],
)
def test_no_command_tries_for_half_a_minute(
    command: str, option: str, nobody: str, tmp_path: Path, program: Any
) -> None:
    text = tmp_path / "novel.txt"
    text.write_text("The grass is green. " * 100)
    started = time.perf_counter()
    words = command.format(text=text, out=tmp_path / "out").split()
    (error,) = program(*words, status=2).err.splitlines()
    # The clients' own six tries take 23 seconds.
    assert time.perf_counter() - started < 10
    assert option in error and "the hub can't be asked" in error
    assert nobody in error and "HF_HUB_OFFLINE" in error


def test_a_cached_model_needs_no_hub(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unreachable("me/mine") is not None
    monkeypatch.setattr(hub_access, "try_to_load_from_cache", lambda *given, **more: "config.json")
    assert needs_cache("--model", "me/mine")


def test_a_folder_is_not_asked_for_and_another_name_is_refused(tmp_path: Path) -> None:
    assert not needs_cache("--model", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"--model .*none: no such folder, and no hub id"):
        needs_cache("--model", str(tmp_path / "none"))


def test_the_users_own_wish_to_be_offline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_access, "is_offline_mode", lambda: True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set"):
        needs_cache("--model", "me/mine")


def test_a_model_that_is_a_file_is_said_to_be_one(
    nobody: str, tmp_path: Path, program: Any
) -> None:
    novel = tmp_path / "novel.txt"
    novel.write_text("The grass is green.")
    error = program("eval", "niah", "--model", novel, status=2).err
    assert f"--model {novel} is a file: give the folder" in error
    # The name of a file may look like a hub id; the hub is not asked about it.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(NotADirectoryError, match=r"--shape novel\.txt is a file"):
            needs_cache("--shape", "novel.txt")
