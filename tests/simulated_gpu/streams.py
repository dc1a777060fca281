"""Streams, events and captures of a simulated GPU, in place of torch's."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_kvret.testing import tape

from .clocks import Agent
from .simulation import Capture, active, site

_numbers = itertools.count(1)
_chosen = threading.local()


class Stream:
    """In place of ``torch.cuda.Stream``: work in an order of its own."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        del priority, kwargs
        self.device = device_named(device)
        self.cuda_stream = next(_numbers)
        self.agent = Agent(f"stream{self.cuda_stream}")

    def wait_stream(self, other: Stream) -> None:
        """Work from here on comes after all of ``other``'s so far."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Work from here on comes after the event."""
        simulation = active()
        capture = simulation.capture
        if capture is not None:
            if self is capture.stream and event.captured_in is not capture:
                capture.is_valid = False
                raise RuntimeError(
                    "CUDA error: dependency created on uncaptured work in another stream"
                )
            if event.captured_in is capture and self is not capture.stream:
                simulation.report("capture", "another stream is pulled into the capture")
        self.agent.join(event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        """An event after all of the work so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for all of the work so far. RuntimeError within its own capture."""
        capture = active().capture
        if capture is not None and self is capture.stream:
            # No mode allows it: what is captured is never done.
            capture.is_valid = False
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        active().wait_for(self.agent.seen, "Stream.synchronize")


class Event:
    """In place of ``torch.cuda.Event``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.seen: dict[str, int] = {}
        self.captured_in: Capture | None = None

    def record(self, stream: Stream | None = None) -> None:
        """The moment after the work of ``stream`` so far."""
        simulation, stream = active(), stream or current_stream()
        begin_work(stream)
        self.seen = dict(stream.agent.seen)
        capture = simulation.capture
        self.captured_in = capture if capture and stream is capture.stream else None

    def synchronize(self) -> None:
        """The host waits for the event."""
        active().wait_for(self.seen, "Event.synchronize")

    def query(self) -> bool:
        """Whether the host knows that it is over."""
        host = active().host()
        return all(host.has_seen(name, epoch) for name, epoch in self.seen.items())


@dataclass
class _Input:
    """One memory from before a capture that its graph uses.

    Attributes:
        memory: dead once it was freed.
        alias: the same addresses, which keep nothing alive.
        site: lines of the library that used it in the capture.
    """

    memory: weakref.ref[Any]
    alias: Any
    site: str


class _CaptureTape(tape.Tape):
    """As a graph it has addresses of what was there before: its caller keeps the tensors.

    The tape's refusals make the capture invalid, as those of the simulation do.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self._inputs: list[_Input] = []
        # The newest one that begins at an address.
        self._by_address: dict[int, _Input] = {}

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__torch_dispatch__(*args, **kwargs)
        except tape.CaptureError:
            self._capture.is_valid = False
            raise

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` for replays, which does not keep its memory.

        Other memory of the host is used by the host, at the capture: that is returned as it is.
        """
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            memory = tensor.untyped_storage()
            on_device = active().device_of(tensor).type == "cuda"
            if not memory.nbytes() or not (on_device or active().is_pinned(tensor)):
                return tensor
            form = tensor.storage_offset(), tensor.shape, tensor.stride()
            alias: torch.Tensor = tensor.new_empty(0).detach()
            return alias.set_(self._alias_of(memory), *form)

    def check_inputs(self) -> None:
        """SimulationError where some was freed, which a GPU would read as it is by now."""
        for each in self._inputs:
            if each.memory() is None:
                raise active().fault(
                    "stale", f"a replay uses memory that was freed, captured at [{each.site}]"
                )

    def _alias_of(self, memory: Any) -> Any:
        address = memory.data_ptr()
        entry = self._by_address.get(address)
        if entry is None or entry.memory() is not memory:
            buffer = (ctypes.c_char * memory.nbytes()).from_address(address)
            alias: Any = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
            # Its device and its log.
            vars(alias).update(vars(memory))
            entry = self._by_address[address] = _Input(weakref.ref(memory), alias, site())
            self._inputs.append(entry)
        return entry.alias


class Graph:
    """In place of ``torch.cuda.CUDAGraph``; records onto the tape.

    As in torch from 2.12 on, the workspaces of the stream that it was captured on are gone when it
    is destroyed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self._entered = ExitStack()
        self._capture: Capture | None = None
        # None until a capture has ended well.
        self._redo: tuple[Callable[[], None], ...] | None = None
        self._tape: Any = None
        # Graphs of the same stream that were destroyed before.
        self._destroyed: tuple[Counter[str], str, int] | None = None

    def __del__(self) -> None:
        self._destroy()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "thread_local") -> None:
        """Work of the current stream is recorded from here on; its device does nothing."""
        del pool
        assert capture_error_mode == "thread_local", "no other mode is simulated"
        simulation, stream = active(), current_stream()
        if simulation.capture is not None:
            raise RuntimeError("CUDA error: a capture is under way in this process")
        if stream is default_stream(stream.device):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._entered = ExitStack()
        self._redo = None
        capture = Capture(stream, stream.agent, self._entered.close)
        self._capture = simulation.capture = capture
        self._tape = _CaptureTape(self._capture)
        self._entered.enter_context(self._tape)
        self._entered.enter_context(tape.logged_launches(self._tape))

    def capture_end(self) -> None:
        """RuntimeError: an operation was refused meanwhile."""
        simulation, capture = active(), self._capture
        if capture is None:
            raise RuntimeError("capture_end without capture_begin")
        capture.leave()
        simulation.capture = None
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._tape.undo()
        if not capture.is_valid:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        self._redo = tuple(self._tape.operations)
        destroyed, name = simulation.destroyed, capture.stream.agent.name
        self._destroyed = destroyed, name, destroyed[name]

    def replay(self) -> None:
        """Do the recorded work on the current stream.

        SimulationError where memory that it needs was freed since the capture.
        """
        if self._redo is None or self._capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._tape.check_inputs()
        assert self._destroyed is not None, "a capture that ended well sets it"
        destroyed, name, before = self._destroyed
        if destroyed[name] > before:
            active().report("stale", f"the workspaces of {name} went with another graph")
        simulation, agent = active(), begin_work(current_stream())
        for log, writes, what in self._capture.accesses:
            simulation.note(log, agent, writes, f"replayed {what}", site())
        with torch.inference_mode(), _disable_current_modes(), torch._C.DisableTorchFunction():
            for redo in self._redo:
                redo()

    def reset(self) -> None:
        """Forget the work."""
        self._destroy()
        self._capture = self._redo = self._tape = None

    def _destroy(self) -> None:
        if self._destroyed is not None:
            destroyed, name, _ = self._destroyed
            destroyed[name] += 1
            self._destroyed = None


def begin_work(stream: Stream) -> Agent:
    """The agent of ``stream``, about to do what this thread launches now."""
    stream.agent.join(active().host().seen)
    stream.agent.tick()
    return stream.agent


def device_named(device: Any) -> torch.device:
    """With its index; of None and of ``"cuda"`` that of the current device."""
    if device is None:
        return current_device()
    location = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if location.type != "cuda":
        return location
    if location.index is None:
        return current_device()
    if location.index >= active().device_count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: {location} of {active().device_count}"
        )
    return location


def current_device() -> torch.device:
    """The current device of this thread."""
    return torch.device("cuda", getattr(_chosen, "device", 0))


def default_stream(device: Any = None) -> Stream:
    """The default stream of a device."""
    streams, location = active().default_streams, device_named(device)
    if location not in streams:
        streams[location] = Stream(location)
    stream: Stream = streams[location]
    return stream


def current_stream(device: Any = None) -> Stream:
    """The current stream of this thread on a device."""
    location = device_named(device)
    chosen: Stream | None = getattr(_chosen, "streams", {}).get(location)
    return chosen or default_stream(location)


def forget_choices() -> None:
    """This thread has chosen no device and no stream."""
    _chosen.__dict__.clear()


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """In place of ``torch.cuda.stream``."""
    if stream is None:
        yield
        return
    streams = _chosen.__dict__.setdefault("streams", {})
    before = streams.get(stream.device)
    with on_device(stream.device):
        streams[stream.device] = stream
        try:
            yield
        finally:
            streams[stream.device] = before


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """In place of ``torch.cuda.device``."""
    before = getattr(_chosen, "device", 0)
    location = current_device() if device is None or device == -1 else device_named(device)
    _chosen.device = location.index if location.type == "cuda" else before
    try:
        yield
    finally:
        _chosen.device = before


def choose_device(device: Any) -> None:
    """In place of ``torch.cuda.set_device``."""
    _chosen.device = device_named(device).index
