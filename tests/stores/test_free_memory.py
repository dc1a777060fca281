"""The host memory that a process can still take, read from files that a test wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_kvret.stores import free_memory
from hf_kvret.stores.free_memory import free_host_bytes

MIB = 2**20
SYSTEM = 8000 * MIB
CACHED = "anon 123\nfile 999\ninactive_file 104857600\nactive_file 52428800\nshmem 7"
SCOPE = "/user.slice/session.scope"


@pytest.mark.parametrize(
    ("process", "files", "expected"),
    [
        # No cgroup; a limit, one that was lowered, none, and one above what there is.
        (None, {}, SYSTEM),
        ("/", {"/memory.max": 1000 * MIB, "/memory.current": 300 * MIB}, 700 * MIB),
        ("/", {"/memory.max": 1000 * MIB, "/memory.current": 1200 * MIB}, 0),
        ("/", {"/memory.max": "max", "/memory.current": 300 * MIB}, SYSTEM),
        ("/", {"/memory.max": 90000 * MIB, "/memory.current": 300 * MIB}, SYSTEM),
        # Page cache is free.
        (
            "/",
            {
                "/memory.max": 1000 * MIB,
                "/memory.current": 1000 * MIB,
                "/memory.stat": CACHED,
            },
            150 * MIB,
        ),
        # Groups above the process count, and limits by which it is slowed down.
        (
            SCOPE,
            {"/user.slice/memory.max": 2000 * MIB, "/user.slice/memory.current": 500 * MIB},
            1500 * MIB,
        ),
        (
            SCOPE,
            {
                f"{SCOPE}/memory.max": 900 * MIB,
                f"{SCOPE}/memory.high": 400 * MIB,
                f"{SCOPE}/memory.current": 300 * MIB,
            },
            100 * MIB,
        ),
        # A container may be shown a path of its host.
        ("/docker/0123", {"/memory.max": 600 * MIB, "/memory.current": 100 * MIB}, 500 * MIB),
        ("/../other", {"/memory.max": 600 * MIB, "/memory.current": 100 * MIB}, 500 * MIB),
    ],
)
def test_the_least_of_system_and_cgroups_is_free(
    process: str | None,
    files: dict[str, int | str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    monkeypatch.setattr(free_memory, "PROC", proc)
    monkeypatch.setattr(free_memory, "CGROUPS", groups)
    contents = {proc / "meminfo": f"MemTotal: 9999999 kB\nMemAvailable:  {SYSTEM // 1024} kB\n"}
    if process is not None:
        contents[proc / "self" / "cgroup"] = f"4:memory:/jobs\n0::{process}\n"
    # A group outside of the container.
    contents |= {tmp_path / "other" / name: "1\n" for name in ("memory.max", "memory.current")}
    contents |= {groups / path[1:]: f"{value}\n" for path, value in files.items()}
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_host_bytes() == expected
    if not files:
        (proc / "meminfo").write_text("")
        assert free_host_bytes() is None, "nobody says"
