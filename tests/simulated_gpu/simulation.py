"""The state of a simulated GPU: devices of tensors, agents, findings and waits."""

import itertools
import sys
import sysconfig
import threading
import warnings
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .clocks import Agent, MemoryLog

CPU = torch.device("cpu")
# Lines of these don't stand in findings: what simulates, what is simulated, and Python's own.
_OTHERS = ("/tests/simulated_gpu/", "/hf_kvret/testing/tape.py", "/torch/", "/triton/")
_PYTHON = sysconfig.get_path("stdlib")
_LINES = 4
_host_numbers = itertools.count()


class SimulationError(RuntimeError):
    """A GPU would refuse this."""


@dataclass(frozen=True)
class Finding:
    """Something that would be wrong on a GPU.

    Attributes:
        kind: ``"race"`` (a stream or the host did not wait), ``"freed"`` (memory was given back
            while another stream used it), ``"stale"`` (a graph is replayed whose memory was given
            back), ``"device"``, ``"capture"``, ``"copy"``, ``"compile"`` (a kernel may be compiled
            within a capture) or ``"alignment"``.
        text: what, and on which memory.
        site: lines that led to it, the innermost first.
    """

    kind: str
    text: str
    site: str


@dataclass(frozen=True)
class Wait:
    """The host waited for the device.

    Attributes:
        phase: ``Simulation.phase`` then.
        text: what waited.
        site: lines that led to it.
    """

    phase: str
    text: str
    site: str


class Simulation:
    """A CUDA device that is not there. See ``simulated``.

    Attributes:
        device_count: of the devices.
        findings: what would be wrong, with how often.
        waits: of the host, with how often.
        launches: of Triton kernels, by phase and name.
        compilations: of Triton kernels, by phase and name: specialisations that were new.
        phase: names what is going on, for waits and launches; yours to set.
        capture: the one that has begun and not ended; None.
        destroyed: graphs that were destroyed, by the stream that they were captured on.
        sync_debug: torch's mode for waits: 0 says nothing, 1 warns.
    """

    def __init__(self, device_count: int = 1) -> None:
        self.device_count = device_count
        self.findings: Counter[Finding] = Counter()
        self.waits: Counter[Wait] = Counter()
        self.launches: Counter[tuple[str, str]] = Counter()
        self.compilations: Counter[tuple[str, str]] = Counter()
        self.phase = ""
        self.capture: Capture | None = None
        self.destroyed: Counter[str] = Counter()
        self.sync_debug = 0
        # Streams by device.
        self.default_streams: dict[torch.device, Any] = {}
        # First address and end of host memory that was registered, and the log of its rows.
        self.registered: dict[int, tuple[int, MemoryLog]] = {}
        # First address, end, device and log of memory on the devices.
        self._on_devices: dict[int, tuple[int, torch.device, MemoryLog]] = {}
        # Specialisations of kernels so far.
        self.specialisations: dict[tuple[str, str], set[Any]] = {}
        self._lock = threading.RLock()
        self._hosts: dict[int, Agent] = {}
        # Accesses to memory that was given back, until it may be handed out again.
        self._given_back: list[tuple[Agent, str, int, str, str]] = []

    @property
    def kinds(self) -> list[str]:
        """The kind of each finding, in order."""
        return [finding.kind for finding in self.findings]

    def report(self, kind: str, text: str) -> None:
        """Add a finding."""
        with self._lock:
            self.findings[Finding(kind, text, site())] += 1

    def fault(self, kind: str, text: str) -> SimulationError:
        """A finding, as the error that ends the work."""
        self.report(kind, text)
        return SimulationError(text)

    def host(self) -> Agent:
        """This thread."""
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._hosts:
                self._hosts[thread] = Agent(f"host{next(_host_numbers)}")
            return self._hosts[thread]

    def wait_for(self, seen: dict[str, int], text: str) -> None:
        """The host waits. RuntimeError within a capture, which is then invalid."""
        self.check_capture(text)
        with self._lock:
            self.waits[Wait(self.phase, text, site())] += 1
        if self.sync_debug:
            warnings.warn(f"called a synchronizing CUDA operation ({text})", stacklevel=4)
        self.host().join(seen)

    def check_capture(self, text: str) -> None:
        """RuntimeError where this thread's capture forbids ``text``; it is invalid from then on."""
        capture = self.capture
        if capture is not None and capture.thread == threading.get_ident():
            capture.is_valid = False
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({text})"
            )

    def waits_in(self, *phases: str) -> list[Wait]:
        """Waits of these phases."""
        return [wait for wait in self.waits if wait.phase in phases]

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor is said to lie."""
        location = getattr(tensor.untyped_storage(), "simulated_device", CPU)
        assert isinstance(location, torch.device), "only put writes it"
        return location

    def put(self, tensor: torch.Tensor, device: torch.device, home: Agent | None) -> torch.Tensor:
        """The memory of ``tensor`` lies on ``device``, allocated by the stream ``home``."""
        storage: Any = tensor.untyped_storage()
        log = getattr(storage, "simulated_log", None)
        is_own = isinstance(log, MemoryLog) and log.owner is self
        if getattr(storage, "simulated_device", None) == device and is_own:
            return tensor
        storage.simulated_device = device
        if device.type == "cuda":
            log = MemoryLog(home=home, made_at=site(), owner=self)
            storage.simulated_log = log
            first = storage.data_ptr()
            self._on_devices[first] = first + storage.nbytes(), device, log
            weakref.finalize(storage, self._on_devices.pop, first, None).atexit = False
            if home is not None:
                self._hand_out(home)
                weakref.finalize(storage, self._take_back, log).atexit = False
        return tensor

    def memories_at(self, device: torch.device, addresses: list[int]) -> list[MemoryLog | None]:
        """The logs of what a kernel on ``device`` reads there: its own and registered memory.

        None for an address in neither.
        """
        spans = [(first, end, log) for first, (end, log) in self.registered.copy().items()]
        spans += [
            (first, end, log)
            for first, (end, own, log) in self._on_devices.copy().items()
            if own == device
        ]
        # They don't overlap.
        spans = sorted((span for span in spans if span[0] < span[1]), key=itemgetter(0))

        def at(address: int) -> MemoryLog | None:
            location = bisect_right(spans, address, key=itemgetter(0))
            _, end, log = spans[location - 1] if location else (0, 0, None)
            return log if address < end else None

        return [at(address) for address in addresses]

    def unregister(self, address: int) -> None:
        """Host memory is pinned no longer; a stream that may still use it is a finding."""
        _, log = self.registered.pop(address, (0, None))
        for name, access in () if log is None else log.accesses().items():
            if name.startswith("stream") and not self.host().has_seen(name, access.epoch):
                text = f"host memory was unpinned while {name} may still use it at [{access.site}]"
                self.report("freed", text)

    def log_of(self, tensor: torch.Tensor) -> MemoryLog:
        """The log of the memory of ``tensor``."""
        storage: Any = tensor.untyped_storage()
        log = getattr(storage, "simulated_log", None)
        # What an earlier simulation did is over, and its streams are gone.
        if not isinstance(log, MemoryLog) or log.owner is not self:
            log = storage.simulated_log = MemoryLog(owner=self)
        return log

    def access(
        self, agent: Agent, tensors: Iterable[torch.Tensor], writes: bool, what: str
    ) -> None:
        """``agent`` reads or writes these tensors."""
        line = site()
        for tensor in tensors:
            if tensor.numel():
                log = self.log_of(tensor)
                self._register(tensor, log)
                self.note(log, agent, writes, what, line)

    def note(self, log: MemoryLog, agent: Agent, writes: bool, what: str, line: str) -> None:
        """One access to the memory of ``log``."""
        log.note(agent, writes, what, line, self.report)
        if self.capture is not None and agent is self.capture.agent:
            self.capture.accesses.append((log, writes, what))

    def pin(self, tensor: torch.Tensor) -> None:
        """A device may read the memory of ``tensor`` over the bus."""
        storage: Any = tensor.untyped_storage()
        storage.simulated_pin = True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a device could read it over the bus."""
        if getattr(tensor.untyped_storage(), "simulated_pin", False):
            return True
        address = tensor.data_ptr()
        return any(first <= address < end for first, (end, _) in self.registered.copy().items())

    def _register(self, tensor: torch.Tensor, log: MemoryLog) -> None:
        """Kernels find rows in host memory by their addresses, so note whose these are."""
        address = tensor.data_ptr() if self.registered else 0
        for first, (end, _) in self.registered.copy().items():
            if first <= address < end:
                self.registered[first] = end, log

    def _take_back(self, log: MemoryLog) -> None:
        home = log.home
        if home is not None:
            with self._lock:
                self._given_back += [
                    (home, name, access.epoch, access.site, log.made_at)
                    for name, access in log.unfinished()
                ]

    def _hand_out(self, home: Agent) -> None:
        """Memory that ``home`` gave back may be handed out to it again from here on."""
        with self._lock:
            entries = [entry for entry in self._given_back if entry[0] is home]
            self._given_back = [entry for entry in self._given_back if entry[0] is not home]
            for _, name, epoch, line, made_at in entries:
                if not home.has_seen(name, epoch):
                    text = (
                        f"memory of {home.name}, allocated at [{made_at}], was freed while {name} "
                        "may still use it, and no record_stream told the allocator"
                    )
                    self.findings[Finding("freed", text, line)] += 1


@dataclass(eq=False)
class Capture:
    """A capture that has begun and not ended.

    Attributes:
        stream: that is captured, a ``Stream``.
        agent: of the stream.
        leave: stops recording.
        thread: that captures.
        accesses: to memory so far, to be repeated by each replay.
        is_valid: False once an operation was refused.
    """

    stream: Any
    agent: Agent
    leave: Callable[[], None]
    thread: int = field(default_factory=threading.get_ident)
    accesses: list[tuple[MemoryLog, bool, str]] = field(default_factory=list)
    is_valid: bool = True


_active: Simulation | None = None


def active() -> Simulation:
    """The simulation that is entered. RuntimeError: none is."""
    if _active is None:
        raise RuntimeError("no simulated GPU: this belongs into `with simulated():`")
    return _active


def is_active(simulation: Simulation) -> bool:
    """Whether it is the one that is entered."""
    return _active is simulation


@contextmanager
def activate(simulation: Simulation) -> Iterator[None]:
    """One at a time."""
    global _active
    if _active is not None:
        raise RuntimeError("a simulated GPU is entered already")
    _active = simulation
    try:
        yield
    finally:
        _active = None


def site() -> str:
    """``file:line`` of the innermost lines that are told, joined by `` < ``."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < _LINES:
        name = frame.f_code.co_filename
        if not _is_others(name):
            lines.append(f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)


def _is_others(name: str) -> bool:
    if name.startswith("<") or any(folder in name for folder in _OTHERS):
        return True
    return name.startswith(_PYTHON) and "-packages" not in name


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
