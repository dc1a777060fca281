"""Files of a folder are replaced all at once or not at all, and only our own."""

import errno
import json
import multiprocessing
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from hf_kvret.saved import folder
from hf_kvret.saved.folder import replace_file, replacing

from .save_steps import at_each_step, killed_saves

OLD, NEW, NEXT = "a" * 12, "b" * 12, "c" * 12
# `save` syncs and renames each of three files, and syncs the folder twice.
STEPS = 8


def save(directory: Path, version: str, content: bytes = b"") -> None:
    with replacing(directory, "it.json", "it") as new:
        name = new.keep(content or version.encode(), version)
        new.put_beside("card.md", version.encode())
        new.commit(json.dumps({"file": name}).encode())


def load(directory: Path) -> str:
    name = json.loads((directory / "it.json").read_text())["file"]
    return (directory / name).read_text()


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".it.json.lock"}


def whole(version: str) -> set[str]:
    return {"it.json", f"it-{version}.safetensors", "card.md"}


def test_a_save_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "down"
    save(place, OLD)
    others = {"notes.txt", "it.safetensors", f"it-{OLD[1:]}.safetensors", ".it-x", f"it-{OLD}.zip"}
    # What broken saves left.
    left = {f"it-{'e' * 12}.safetensors", f".it-{'0' * 16}.unfinished"}
    for name in others | left:
        (place / name).write_text("mine")
    save(place, NEW)
    assert files(place) == others | whole(NEW)
    usual = (place / "notes.txt").stat().st_mode
    assert {(place / name).stat().st_mode for name in whole(NEW)} == {usual}
    # The same version mends its file.
    (place / f"it-{NEW}.safetensors").write_bytes(b"damaged")
    save(place, NEW)
    assert load(place) == NEW


@pytest.mark.parametrize("name", ["it.json", f"it-{NEW}.safetensors", "card.md"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    victim, place = tmp_path / "victim", tmp_path / "place"
    victim.write_text("precious")
    place.mkdir()
    (place / name).symlink_to(victim)
    save(place, NEW)
    assert victim.read_text() == "precious" and load(place) == NEW


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_an_error_at_any_step_leaves_the_old_or_the_new(
    fault: BaseException, tmp_path: Path
) -> None:
    for number in range(STEPS):
        place = tmp_path / str(number)
        save(place, OLD)

        def fail(step: int, number: int = number) -> None:
            if step == number:
                raise fault

        with pytest.MonkeyPatch.context() as patch:
            at_each_step(patch, fail)
            with pytest.raises(type(fault)) as raised:
                save(place, NEW)
        # From the naming file on, the new one counts.
        assert load(place) == (OLD if number < STEPS - 2 else NEW)
        if isinstance(fault, OSError) and number < STEPS - 3:
            assert files(place) == whole(OLD)
            assert "what was there before is as it was: free space" in str(raised.value)
        save(place, NEXT)
        assert files(place) == whole(NEXT)


def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = []
    for place in killed_saves(tmp_path, partial(save, version=OLD), partial(save, version=NEW)):
        seen.append(load(place))
        save(place, NEXT)
        assert files(place) == whole(NEXT)
    assert seen == [OLD] * (len(seen) - 3) + [NEW] * 3


def test_content_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves: nothing has a name before its content is on the disk."""
    synced: set[int] = set()
    events: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            events.append("folder")
        synced.add(os.fstat(descriptor).st_ino)

    def replace(source: str, target: str) -> None:
        assert os.stat(source).st_ino in synced
        events.append(Path(target).name)
        real_replace(source, target)

    monkeypatch.setattr(folder.os, "fsync", sync)
    monkeypatch.setattr(folder.os, "replace", replace)
    save(tmp_path, NEW)
    assert events == [f"it-{NEW}.safetensors", "folder", "it.json", "card.md", "folder"]


def test_a_file_in_place_of_a_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"could not be written .* give another place"):
        folder.replace_file(tmp_path / "file" / "card.md", b"x")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_full_disk_leaves_the_old(tmp_path: Path, kind: str) -> None:
    """The limit on file sizes stands for it: a real one, of the system."""
    save(tmp_path, OLD)
    child = os.fork()
    if child == 0:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            if kind == "file":
                folder.replace_file(tmp_path / "card.md", b"x" * (1 << 20))
            save(tmp_path, NEW, b"x" * (1 << 20))
        except OSError as error:
            os._exit(7 if error.errno == errno.EFBIG and "free space" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert load(tmp_path) == OLD and files(tmp_path) == whole(OLD)


def _save_many(directory: Path, digit: str) -> None:
    for _ in range(3):
        save(directory, digit * 12)


def test_saves_at_the_same_time_follow_one_another(tmp_path: Path) -> None:
    """Saves of processes and of threads: none takes the other's files for leftovers."""
    save(tmp_path, OLD)
    one = multiprocessing.get_context("fork").Process(target=_save_many, args=(tmp_path, "1"))
    two = threading.Thread(target=_save_many, args=(tmp_path, "2"))
    one.start()
    two.start()
    _save_many(tmp_path, "3")
    two.join()
    one.join()
    assert one.exitcode == 0
    assert files(tmp_path) == whole(load(tmp_path))


def test_one_file_is_replaced_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "results.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    at_each_step(monkeypatch, lambda step: os.stat("/nowhere"))
    with pytest.raises(FileNotFoundError):
        replace_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [one.name for one in path.parent.iterdir()] == ["results.json"]
