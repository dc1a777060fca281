"""Reading a store chunk by chunk: how long a chunk is, and the next one while this one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

# Merging the result of a chunk costs the same whatever its length, so chunks are long.
_LEAST_LEN = 4096
_MOST_LEN = 32_768
_MOST_BYTES = 256 << 20

# Programs that copy from the host: enough to keep its bus busy, few enough to leave the device to
# the attention over the chunk before.
BUS_PROGRAMS = 64

# By the stream that uses the chunks.
_streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def chunk_len(queries: int, keys: torch.Tensor, row_elements: int) -> int:
    """Tokens of a chunk of the store that ``queries`` new tokens attend to at once.

    Twice the number of queries, within 4096 to 32768, and at most 256 MiB of rows (but at least
    one token). So a chunk of a prompt needs little extra memory and few merges.

    Args:
        queries: for each sequence of the batch.
        keys: any ``[B, Hkv, *, D]`` with the batch and dtype of the rows.
        row_elements: elements of a token's keys and values in attention, of all heads.
    """
    row_bytes = len(keys) * row_elements * keys.element_size()
    tokens = min(max(2 * queries, _LEAST_LEN), _MOST_LEN)
    return max(1, min(tokens, _MOST_BYTES // row_bytes))


def reading_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which rows are read ahead for the current one of ``device``, a CUDA device.

    The same every time, and another for each current stream: memory of chunks goes from one reader
    to the next on the reading stream, which knows only the work on the stream that it reads for.
    """
    user = torch.cuda.current_stream(device)
    if user not in _streams:
        _streams[user] = torch.cuda.Stream(device)
    return _streams[user]


def finish_reading(device: torch.device) -> None:
    """Have the host wait until nothing is being read ahead for ``device``, a CUDA device."""
    for stream in list(_streams.values()):
        if stream.device == device:
            stream.synchronize()


def read_ahead(
    read: Callable[[int, int], torch.Tensor],
    spans: Iterable[tuple[int, int]],
    stream: torch.cuda.Stream | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """``(first, read(first, last))`` for each span, in order.

    With a stream, spans are read on it: the first at once, each later one while the chunk before it
    is in use, so two chunks are in memory at a time. The current stream waits for a chunk when it
    is handed out, the host never does. Without a stream, each span is read on demand. Drop a chunk
    before requesting the next one, or three are in memory.

    Args:
        read: makes a new tensor on the current stream, from what was there before.
        spans: what ``read`` is called with.
        stream: on the device of the chunks, or None.
    """
    if stream is None:
        return ((first, read(first, last)) for first, last in spans)
    return _read_on(stream, read, iter(spans))


def _read_on(
    stream: torch.cuda.Stream,
    read: Callable[[int, int], torch.Tensor],
    spans: Iterator[tuple[int, int]],
) -> Iterator[tuple[int, torch.Tensor]]:
    """``read_ahead`` with a stream.

    Chunks are allocated on that stream, which waits for the current one before each chunk. So the
    memory of a dropped chunk is overwritten only when its users are done. If the current stream is
    no longer the one that reading began for, it is recorded with the chunk.
    """
    user = torch.cuda.current_stream(stream.device)

    def start() -> tuple[int, torch.Tensor, torch.cuda.Event] | None:
        span = next(spans, None)
        if span is None:
            return None
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            return span[0], read(*span), stream.record_event()

    def chunks(
        chunk: tuple[int, torch.Tensor, torch.cuda.Event] | None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        while chunk is not None:
            first, rows, event = chunk
            chunk = start()
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(event)
            if current != user:
                rows.record_stream(current)
            yield first, rows
            # Freed before the next one but one is made.
            del rows

    return chunks(start())
