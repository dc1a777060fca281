"""How long chunks are, and the order of work when the next one is read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hf_kvret.stores.chunks import chunk_len, read_ahead


@pytest.mark.parametrize(
    ("queries", "batch", "elements", "expected"),
    [
        *((1, 1, 2048, 4096), (5000, 1, 2048, 10_000), (100_000, 1, 2048, 32_768)),
        # No chunk is longer than 256 MiB: here 64 rows of 2048 numbers in two bytes.
        (32_768, 64, 2048, 1024),
        # A chunk has a token, however large.
        (5, 1 << 16, 1 << 15, 1),
    ],
)
def test_chunks_follow_the_queries(queries: int, batch: int, elements: int, expected: int) -> None:
    keys = torch.empty(batch, 1, 0, 1, dtype=torch.bfloat16)
    assert chunk_len(queries, keys, elements) == expected


class _Stream:
    """What ``read_ahead`` uses of a stream, which writes down what it is told."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"chunk {self.events - 1}"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[_Stream, list[str]]:
    """A side stream and the log of it and the main one."""
    log: list[str] = []
    main, side = _Stream("main", log), _Stream("side", log)
    current = [main]

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    return side, log


def _read(log: list[str]):  # type: ignore[no-untyped-def]
    def read(first: int, last: int) -> torch.Tensor:
        log.append(f"{torch.cuda.current_stream().name} reads {first} to {last}")  # type: ignore[attr-defined]
        return torch.arange(first, last)

    return read


def test_the_next_chunk_is_read_beside_this_ones_work(streams: tuple[_Stream, list[str]]) -> None:
    side, log = streams
    chunks = read_ahead(_read(log), [(0, 4), (4, 8), (8, 9)], side)  # type: ignore[arg-type]
    log.append("main attends to the new tokens")
    for number, (first, rows) in enumerate(chunks):
        assert rows[0] == first == 4 * number
        log.append(f"main attends to chunk {number}")
    assert log == [
        # At once, for the tokens before were launched before.
        "side waits for main",
        "side reads 0 to 4",
        "main attends to the new tokens",
        "side waits for main",
        "side reads 4 to 8",
        "main waits for chunk 0",
        "main attends to chunk 0",
        # Its memory may be that of chunk 0, which is attended to before.
        "side waits for main",
        "side reads 8 to 9",
        "main waits for chunk 1",
        "main attends to chunk 1",
        "main waits for chunk 2",
        "main attends to chunk 2",
    ]


def test_chunks_that_change_streams_are_noted(streams: tuple[_Stream, list[str]]) -> None:
    side, log = streams
    other = _Stream("other", log)

    class Rows:
        def record_stream(self, stream: _Stream) -> None:
            log.append(f"noted for {stream.name}")

    chunks = read_ahead(lambda first, last: Rows(), [(0, 1), (1, 2)], side)  # type: ignore[arg-type, return-value]
    next(iter(chunks))
    assert not [entry for entry in log if "noted" in entry]
    with torch.cuda.stream(other):  # type: ignore[arg-type]
        next(iter(chunks))
    assert log[-2:] == ["other waits for chunk 1", "noted for other"]
