"""Pinned host memory, also made in the background before it is needed."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from hf_kvret.contracts.pieces import finish_reading
from hf_kvret.stores.host_memory import mapped, populate
from hf_kvret.stores.numa import prefer

_MEMORY_PAGE = 4096
# Populated at a time: whoever drops a chunk waits for no more.
_PIECE_BYTES = 64 << 20
# CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2

# One worker: populating and pinning are bound by the system's locks.
_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_kvret-pinning")
# Python waits at its end for all that the worker was given. The main thread is alive meanwhile, and
# functions of ``atexit`` come later.
_is_ending = threading.Event()
threading._register_atexit(_is_ending.set)  # type: ignore[attr-defined]


class Chunk(NamedTuple):
    """What a chunk is like.

    Attributes:
        shape: its pages first.
        dtype: of its rows.
        device: the GPU that writes it.
        node: of NUMA, whose memory it takes while there is some; None leaves that to the system.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    node: int | None = None

    @property
    def nbytes(self) -> int:
        """Of its rows."""
        return math.prod(self.shape) * self.dtype.itemsize


def pinned(form: Chunk, stream: torch.cuda.Stream) -> torch.Tensor:
    """Pinned memory of exactly this form, in its own memory pages; unpinned with the tensor.

    Callers must keep the tensor itself, not just a view of it.

    Args:
        form: of the tensor.
        stream: that copies to it; unpinning waits for it.

    Raises:
        MemoryError: there is no such memory, or it can't be pinned.
    """
    # Who captures should have its chunks before.
    capturing = torch.cuda.is_current_stream_capturing()
    with nullcontext() if capturing else _beside_captures():
        return _registered(form).as_chunk(form, stream)


class PendingChunk:
    """A pinned chunk that a background thread makes meanwhile.

    Dropping it gives back what there is of it. The thread knows nothing but the form, so it keeps
    no cache alive. Pickled, it is None: rows of another process are not pinned.

    Attributes:
        form: of the chunk.
    """

    def __init__(self, form: Chunk) -> None:
        self.form = form
        # A child process has no thread that would go on.
        self._process = os.getpid()
        is_dropped = threading.Event()
        try:
            self._future = _worker.submit(_prepared, form, is_dropped)
        except RuntimeError:
            # Python has begun to end, in another thread. This will not be begun.
            self._future = Future()
        _when_gone(self, _drop, self._future, is_dropped)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __len__(self) -> int:
        """Pages of it."""
        return self.form.shape[0]

    def take(self, stream: torch.cuda.Stream) -> torch.Tensor:
        """As ``pinned``, once. Waits while the thread makes it; makes it here if none has begun."""
        if self._process != os.getpid() or self._future.cancel():
            return pinned(self.form, stream)
        try:
            made = self._future.result()
        except CancelledError:
            # Python is about to end, but not the thread that asks.
            return pinned(self.form, stream)
        return made.as_chunk(self.form, stream)


class LayerChunks:
    """Chunks for the layers of a cache: what the first asks for in a pass, the others will, too.

    So theirs are made while the device computes the layers before them.

    Args:
        layers: of the cache, each with a store of its own.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        # Forks of a cache share it, and may run in several threads.
        self._lock = threading.Lock()
        self.begin_pass()

    def __reduce__(self) -> tuple[type[LayerChunks], tuple[int]]:
        return type(self), (self._layers,)

    def begin_pass(self) -> None:
        """The first layer is next; chunks that nobody asked for in the pass before are dropped."""
        with self._lock:
            self._asked = 0
            self._pending: deque[PendingChunk] = deque()

    def take(self, form: Chunk, stream: torch.cuda.Stream) -> torch.Tensor:
        """The chunk of the next layer, as ``pinned``.

        If it has another form than that of the first, no more are made in this pass.
        """
        with self._lock:
            is_first, self._asked = not self._asked, self._asked + 1
            pending = self._pending.popleft() if self._pending else None
            if pending is not None and pending.form != form:
                self._pending, pending = deque(), None
        if pending is not None:
            return pending.take(stream)
        # Its own before the others', since the device waits for it.
        chunk = pinned(form, stream)
        if is_first and may_prepare():
            with self._lock:
                self._pending.extend(PendingChunk(form) for _ in range(self._layers - 1))
        return chunk


def may_prepare() -> bool:
    """Whether the background thread takes work: not once Python has begun to end."""
    return not _is_ending.is_set()


class _Registered(NamedTuple):
    """Memory pages that are pinned, and what unpins them; nobody has used them yet."""

    raw: torch.Tensor
    release: weakref.finalize[Any, Any]

    def as_chunk(self, form: Chunk, stream: torch.cuda.Stream) -> torch.Tensor:
        """The tensor that is unpinned, once ``stream`` and its readers are done, when it ends."""
        chunk = self.raw[: form.nbytes].view(form.dtype).view(form.shape)
        self.release.detach()
        _when_gone(chunk, _unpin, chunk.data_ptr(), stream)
        return chunk


def _when_gone(owner: object, undo: Callable[..., None], *args: Any) -> weakref.finalize[Any, Any]:
    """Call ``undo`` when ``owner`` is freed, but not at the end of Python.

    Nor in a child process: it has neither a GPU nor the thread, and locks may stay locked.
    """
    handle = weakref.finalize(owner, _undo_in, os.getpid(), undo, *args)
    handle.atexit = False
    return handle


def _undo_in(process: int, undo: Callable[..., None], *args: Any) -> None:
    if process == os.getpid():
        undo(*args)


def _drop(future: Future[_Registered], is_dropped: threading.Event) -> None:
    is_dropped.set()
    future.cancel()


def _prepared(form: Chunk, is_dropped: threading.Event) -> _Registered:
    """``_registered``, in the background. CancelledError where nobody needs it any more."""

    def check() -> None:
        if is_dropped.is_set() or not may_prepare():
            raise CancelledError

    with _beside_captures():
        return _registered(form, check)


def _registered(form: Chunk, check: Callable[[], None] | None = None) -> _Registered:
    """New memory pages for ``form``, pinned.

    With ``check``, which may raise between two pieces, they are populated first: CUDA would do it,
    but other threads could not launch work meanwhile.
    """
    size = -(-form.nbytes // _MEMORY_PAGE) * _MEMORY_PAGE
    raw = mapped(size, inherited=False)
    if form.node is not None:
        prefer(raw, form.node)
    if check is not None:
        for piece in raw.split(_PIECE_BYTES):
            check()
            populate(piece)
    # Else, in a new thread, the first GPU would be set up, which may not be in use at all.
    with torch.cuda.device(form.device):
        status = int(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), size, 0))
    if status != 0:
        raise MemoryError(
            f"cudaHostRegister could not pin {size / 2**30:.1f} GiB of host memory (error "
            f"{status}): raise the locked-memory limit (ulimit -l), or use store='device'"
        )
    return _Registered(raw, _when_gone(raw, _unregister, raw.data_ptr(), form.device))


def _unregister(address: int, device: torch.device) -> None:
    """Unpin memory that nothing has used."""
    with _beside_captures(), torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def _unpin(address: int, stream: torch.cuda.Stream) -> None:
    """Unregister once no copy and no kernel can still be using the memory."""
    with _beside_captures(), torch.cuda.device(stream.device):
        stream.synchronize()
        torch.cuda.current_stream(stream.device).synchronize()
        finish_reading(stream.device)
        torch.cuda.cudart().cudaHostUnregister(address)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Context for registering memory, and waiting, that breaks no capture of another thread.

    CUDA counts these among the calls that may be unsafe while a stream is captured. Our captures
    forbid them to their own thread alone (``capture_error_mode="thread_local"`` in
    ``replay.recorders``). But torch's default is "global": such a call in any thread makes the
    capture invalid, unless the caller's mode is relaxed, as in here. It puts no work on a stream,
    so a graph loses nothing by it.
    """
    driver = _driver()
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    # Each call gives the mode before it.
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def _driver() -> Any:
    """CUDA's driver; None where there is none, or none that knows modes of captures."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuThreadExchangeStreamCaptureMode") else None
