"""Streams, events and captures of a simulated GPU, in place of torch's."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_kvret.testing import tape

from .clocks import Agent
from .inputs import Inputs
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

    def query(self) -> bool:
        """Whether the host knows that all is done."""
        seen = self.agent.seen
        return active().host().has_seen(self.agent.name, seen[self.agent.name])

    def __enter__(self) -> Stream:
        self._entered = on_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(None, None, None)


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

    def wait(self, stream: Stream | None = None) -> None:
        """Work of ``stream`` from here on comes after the event."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the event."""
        active().wait_for(self.seen, "Event.synchronize")

    def query(self) -> bool:
        """Whether the host knows that it is over."""
        host = active().host()
        return all(host.has_seen(name, epoch) for name, epoch in self.seen.items())

    def elapsed_time(self, other: Event) -> float:
        """1 ms: nothing is timed here."""
        del other
        return 1.0


class _CaptureTape(tape.Tape):
    """The tape's refusals make the capture invalid, as those of the simulation do.

    Attributes:
        inputs: memory that was there before, which is not kept.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self.inputs = Inputs()

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.inputs.held(tensor)

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__torch_dispatch__(*args, **kwargs)
        except tape.CaptureError:
            self._capture.is_valid = False
            raise


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

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", **options: Any
    ) -> None:
        """Work of the current stream is recorded from here on; its device does nothing."""
        del pool, options
        simulation, stream = active(), current_stream()
        if simulation.capture is not None:
            raise RuntimeError("CUDA error: a capture is under way in this process")
        if stream is default_stream(stream.device):
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._entered = ExitStack()
        self._redo = None
        is_global = capture_error_mode == "global"
        capture = Capture(stream, stream.agent, self._entered.close, is_global)
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
        self._tape.inputs.check()
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
