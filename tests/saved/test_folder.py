"""Files of a folder are replaced all at once or not at all, and only our own."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hf_kvret.saved import folder
from hf_kvret.saved.folder import replace_file, replacing

OLD, NEW = "a" * 12, "b" * 12


def save(directory: Path, version: str, content: bytes = b"") -> None:
    with replacing(directory, "it.json", "it") as new:
        name = new.keep(content or version.encode(), version, ".bin")
        new.put_beside("card.md", version.encode())
        new.commit(json.dumps({"file": name}).encode())


def load(directory: Path) -> bytes:
    name = json.loads((directory / "it.json").read_text())["file"]
    return (directory / name).read_bytes()


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def whole(version: str) -> set[str]:
    return {"it.json", f"it-{version}.bin", "card.md"}


def test_a_save_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    """Names that are nearly ours, folders and links stay."""
    target = tmp_path / "elsewhere"
    target.write_text("precious")
    place = tmp_path / "deep" / "down"
    save(place, OLD)
    others = ["notes.txt", "it.bin", f"it-{OLD}", f"it-{OLD[1:]}.bin", f"It-{OLD}.bin", ".it-x"]
    others += ["it-202411250228.zip", f"it-{OLD}.tar", f"it-{OLD}.bin.zip"]
    for name in others:
        (place / name).write_text("mine")
    (place / f"it-{'c' * 12}.bin").mkdir()
    (place / f"it-{'d' * 12}.bin").symlink_to(target)
    before = files(place) - whole(OLD)
    # What broken saves left.
    for name in (f"it-{'e' * 12}.bin", f".it-{'0' * 16}.unfinished"):
        (place / name).write_text("left")
    save(place, NEW)
    assert files(place) == before | whole(NEW)
    assert target.read_text() == "precious"
    assert (place / "card.md").read_text() == NEW
    usual = (place / "notes.txt").stat().st_mode
    assert {(place / name).stat().st_mode for name in whole(NEW)} == {usual}
    # The same version mends its file.
    (place / f"it-{NEW}.bin").write_bytes(b"damaged")
    save(place, NEW)
    assert load(place) == NEW.encode()


@pytest.mark.parametrize("name", ["it.json", f"it-{NEW}.bin", "card.md"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    place = tmp_path / "place"
    place.mkdir()
    (place / name).symlink_to(victim)
    with pytest.raises(ValueError, match="symbolic link"):
        save(place, NEW)
    assert victim.read_text() == "precious"
    assert files(place) == {name}
    (place / name).unlink()
    (place / name).mkdir()
    with pytest.raises(ValueError, match="no ordinary file"):
        save(place, NEW)


def test_a_linked_folder_is_the_folder(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    save(tmp_path / "link", OLD)
    assert load(real) == OLD.encode()


STEPS = ("fsync", "replace")


def _counting(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, str], None]) -> list[str]:
    """Have ``act`` called with number and name before each step of a save; returns the steps."""
    steps: list[str] = []

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            steps.append(name)
            act(len(steps) - 1, name)
            return real(*args, **kwargs)

        return step

    for name in STEPS:
        monkeypatch.setattr(folder.os, name, wrapped(name))
    return steps


def test_an_error_at_any_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        count = len(_counted(tmp_path / "count", patch))
    assert count == 8
    for number in range(count):
        place = tmp_path / str(number)
        save(place, OLD)

        def fail(step: int, name: str, number: int = number) -> None:
            if step == number:
                raise OSError(errno.ENOSPC, f"No space left on device ({name})")

        with pytest.MonkeyPatch.context() as patch:
            _counting(patch, fail)
            with pytest.raises(OSError, match="free space on this disk") as raised:
                save(place, NEW)
        if load(place) == OLD.encode():
            assert files(place) == whole(OLD)
            assert "what was there before is as it was" in str(raised.value)
        else:
            # The last steps only: the names may not have reached the disk, and a power cut may
            # bring back the older ones, whose file is still there.
            assert load(place) == NEW.encode()
            assert number >= count - 3
            assert files(place) == whole(OLD) | whole(NEW)
            assert "in place, but may not survive a power cut" in str(raised.value)
            assert "as it was" not in str(raised.value)
        save(place, "c" * 12)
        assert files(place) == whole("c" * 12)


def _counted(place: Path, patch: pytest.MonkeyPatch) -> list[str]:
    save(place, OLD)
    steps = _counting(patch, lambda number, name: None)
    save(place, NEW)
    return steps


def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        count = len(_counted(tmp_path / "count", patch))
    seen = set()
    for number in range(count):
        place = tmp_path / str(number)
        save(place, OLD)
        child = os.fork()
        if child == 0:
            patch = pytest.MonkeyPatch()
            _counting(
                patch, lambda step, _, n=number: os.kill(os.getpid(), 9) if step == n else None
            )
            save(place, NEW)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        seen.add(load(place))
        assert load(place) in (OLD.encode(), NEW.encode())
        save(place, "c" * 12)
        assert files(place) == whole("c" * 12)
    assert seen == {OLD.encode(), NEW.encode()}


def test_content_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves: nothing has a name before its content is on the disk."""
    synced: set[int] = set()
    folders: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            folders.append("folder")
        synced.add(os.fstat(descriptor).st_ino)

    def replace(source: str, target: str) -> None:
        assert os.stat(source).st_ino in synced
        folders.append(Path(target).name)
        real_replace(source, target)

    monkeypatch.setattr(folder.os, "fsync", sync)
    monkeypatch.setattr(folder.os, "replace", replace)
    save(tmp_path, NEW)
    assert folders == [f"it-{NEW}.bin", "folder", "it.json", "card.md", "folder"]


def test_a_full_disk_leaves_the_old(tmp_path: Path) -> None:
    """The limit on file sizes stands for it: a real one, of the system."""
    save(tmp_path, OLD)
    child = os.fork()
    if child == 0:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            save(tmp_path, NEW, b"x" * (1 << 20))
        except OSError as error:
            os._exit(7 if error.errno == errno.EFBIG and "free space" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert load(tmp_path) == OLD.encode()
    assert files(tmp_path) == whole(OLD)


def test_an_interrupted_save_leaves_the_old_or_once_it_is_named_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD)
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path, "it.json", "it") as new:
        new.keep(b"half", NEW, ".bin")
        # An artifact that is saved again has the same file.
        new.keep(OLD.encode(), OLD, ".bin")
        (new.new_folder() / "half").touch()
        raise KeyboardInterrupt
    assert files(tmp_path) == whole(OLD)
    assert load(tmp_path) == OLD.encode()
    replace = os.replace

    def interrupted(source: str, goal: Path) -> None:
        """Ctrl-C is noticed when the replacement returns."""
        replace(source, goal)
        if goal.name == "it.json":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, NEW)
    assert load(tmp_path) == NEW.encode()
    save(tmp_path, OLD)
    assert files(tmp_path) == whole(OLD)


def _save_many(directory: Path, digit: str) -> None:
    for _ in range(8):
        save(directory, digit * 12)


def test_saves_at_the_same_time_follow_one_another(tmp_path: Path) -> None:
    """Of processes and of threads: none takes the other's files for leftovers."""
    save(tmp_path, OLD)
    context = multiprocessing.get_context("fork")
    one = context.Process(target=_save_many, args=(tmp_path, "1"))
    two = threading.Thread(target=_save_many, args=(tmp_path, "2"))
    one.start()
    two.start()
    _save_many(tmp_path, "3")
    two.join()
    one.join()
    assert one.exitcode == 0
    version = load(tmp_path).decode()
    assert files(tmp_path) == whole(version)


def test_one_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    replace_file(path, b"old")
    (path.parent / f".results.json-{'0' * 16}.unfinished").write_text("left")
    replace_file(path, b"new")
    assert files(path.parent) == {"results.json"}
    for step in STEPS:
        with pytest.MonkeyPatch.context() as patch:
            denied = PermissionError(errno.EACCES, "Permission denied")
            patch.setattr(folder.os, step, Mock(side_effect=denied))
            with pytest.raises(PermissionError, match="make the folder writable"):
                replace_file(path, b"newer")
        assert path.read_bytes() == b"new"
        assert files(path.parent) == {"results.json"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "_sync_folder", Mock(side_effect=OSError(errno.EIO, "I/O error")))
        with pytest.raises(OSError, match="in place, but may not survive a power cut"):
            replace_file(path, b"newer")
    assert path.read_bytes() == b"newer"
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with pytest.raises(ValueError, match="symbolic link"):
        replace_file(link, b"newest")
    assert path.read_bytes() == b"newer"
    with pytest.raises(OSError, match="give another place"):
        replace_file(path / "below", b"")
