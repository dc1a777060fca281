"""Faults planted into the library: each is found by the simulated GPU.

The list was fixed before the simulator was tried on it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.methods.paris.index import ParisIndex
from hf_kvret.replay import recorders
from hf_kvret.stores import chunks, cpu, memory
from hf_kvret.stores.paged import PagedStore

from ..simulated_gpu import streams
from ..simulated_gpu.simulation import SimulationError
from .cases import Case, Outcome, attempt, check_logits

pytest.importorskip("triton")

HOST, GRAPH, CPU = Case("flat", "host"), Case("flat", "device", "graph"), Case("flat", "cpu")
DEVICE, TWO = Case("flat", "device"), Case("flat", "device", "two devices")
Patch = Callable[[pytest.MonkeyPatch], None]


def put(owner: Any, name: str, new: Any) -> Patch:
    """Replace an attribute."""
    return lambda patch: patch.setattr(owner, name, new)


def within(owner: Any, method: str, owner_2: Any, name: str, new: Any) -> Patch:
    """Replace an attribute of ``owner_2`` while ``method`` of ``owner`` runs."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, method)

        def run_with(*args: Any, **kwargs: Any) -> Any:
            with patch.context() as inner:
                inner.setattr(owner_2, name, new)
                return real(*args, **kwargs)

        patch.setattr(owner, method, run_with)

    return plant


def _between_vectors(ids: torch.Tensor) -> torch.Tensor:
    """The same ids, from an address that is no multiple of 16."""
    return torch.cat([ids.flatten()[:1], ids.flatten()])[1:].view(ids.shape)


def with_ids(change: Callable[[torch.Tensor], Any]) -> Patch:
    """Do ``change`` with the ids that a search finds; where it gives some, they go on."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        search = FlatIndex.search

        def searched(self: FlatIndex, *args: Any) -> torch.Tensor:
            ids = search(self, *args)
            other = change(ids)
            return other if isinstance(other, torch.Tensor) else ids

        patch.setattr(FlatIndex, "search", searched)

    return plant


def _adds_from_before(take: Callable[[list[torch.Tensor]], torch.Tensor]) -> Patch:
    """Add zeros to ids that are made before a capture, and taken out of their list by ``take``."""
    tensors: list[torch.Tensor] = []

    def change(ids: torch.Tensor) -> torch.Tensor:
        if not tensors:
            tensors.append(torch.zeros_like(ids[:1, :1, :1, :1]))
        capturing = torch.cuda.is_current_stream_capturing()
        return ids + (take(tensors) if capturing else tensors[0])

    return with_ids(change)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of what must be done."""


@contextmanager
def _stream_without_order(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


@contextmanager
def _no_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    del stream
    yield


def read_aside(x: torch.Tensor) -> None:
    """On another stream, which the allocator is not told of."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()


_make_basis = ParisIndex._make_basis


def _basis_with_levels_on_the_cpu(self: ParisIndex, dim: int, device: torch.device) -> None:
    _make_basis(self, dim, device)
    assert self._levels is not None
    self._levels = self._levels.cpu()


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        case: what runs with it.
        plant: makes it.
        kind: of the finding; ``"wait"`` for a wait in a decode step, ``"eager"`` where steps are
            not captured any more.
    """

    case: Case
    plant: Patch
    kind: str


FAULTS = {
    # A stream or a thread that does not wait.
    "readers of host rows do not wait": Fault(
        replace(HOST, steps=2, layers=1), put(memory.HostMemory, "wait", nothing), "race"
    ),
    "host rows are written before they are there": Fault(
        HOST, within(memory.HostMemory, "write", streams.Stream, "wait_stream", nothing), "race"
    ),
    "queries are sent before they are there": Fault(
        CPU, within(cpu._Staging, "send", streams.Stream, "wait_stream", nothing), "race"
    ),
    "results are read before they are back": Fault(
        CPU, within(cpu._Staging, "receive", streams.Stream, "wait_event", nothing), "race"
    ),
    "the worker does not wait for the queries": Fault(
        CPU, put(streams.Event, "synchronize", nothing), "race"
    ),
    "a rehearsal is not ordered before later steps": Fault(
        GRAPH, put(recorders, "_on_stream", _stream_without_order), "race"
    ),
    "rows are read ahead before they are there": Fault(
        Case("ctkvr", "host"),
        within(chunks, "_read_on", streams.Stream, "wait_stream", nothing),
        "race",
    ),
    # Memory that goes back to the allocator too early.
    "rows on their way to the host are freed": Fault(
        HOST, within(memory.HostMemory, "write", torch.Tensor, "record_stream", nothing), "freed"
    ),
    "what a side stream reads is freed": Fault(
        DEVICE, with_ids(lambda ids: read_aside(ids + 1)), "freed"
    ),
    # The host waits in a decode step.
    "a step reads a number": Fault(
        replace(DEVICE, steps=2, layers=1), with_ids(lambda ids: int(ids[0, 0, 0, 0])), "wait"
    ),
    # Tensors of two devices.
    "levels of codes lie on the CPU": Fault(
        Case("paris", "device"),
        put(ParisIndex, "_make_basis", _basis_with_levels_on_the_cpu),
        "device",
    ),
    "ids of the second layer lie on the first device": Fault(
        TWO, with_ids(lambda ids: ids.to("cuda:0")), "device"
    ),
    "pages on the host are not pinned": Fault(
        HOST,
        put(memory, "pinned", lambda shape, dtype, stream: torch.empty(shape, dtype=dtype)),
        "device",
    ),
    # What breaks a capture.
    "a captured step reads a number": Fault(
        GRAPH, with_ids(lambda ids: int(ids[0, 0, 0, 0])), "eager"
    ),
    "a captured step copies from memory that moves": Fault(
        GRAPH,
        with_ids(lambda ids: bool(torch.zeros(4).to(ids.device, non_blocking=True).ndim)),
        "capture",
    ),
    "a step is captured on the default stream": Fault(
        GRAPH, put(recorders, "_on_stream", _no_stream), "eager"
    ),
    "pending copies are left for the capture": Fault(
        Case("flat", "host", "graph"), put(PagedStore, "before_capture", nothing), "eager"
    ),
    "a graph outlives the capture of the next one": Fault(
        GRAPH, put(streams.Graph, "reset", nothing), "stale"
    ),
    "a captured step reads what is then freed": Fault(GRAPH, _adds_from_before(list.pop), "stale"),
    # Launches.
    "ids begin between two vectors": Fault(DEVICE, with_ids(_between_vectors), "alignment"),
    "a graph compiles a kernel": Fault(
        GRAPH,
        with_ids(
            lambda ids: _between_vectors(ids) if torch.cuda.is_current_stream_capturing() else None
        ),
        "compile",
    ),
}
QUICK = ("readers of host rows do not wait", "a step reads a number")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAULTS]
)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    outcome = attempt(fault.case)
    assert fault.kind in signs(outcome), (outcome.error, outcome.gpu.findings, outcome.gpu.waits)


@pytest.mark.slow
def test_a_captured_step_may_read_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _adds_from_before(lambda tensors: tensors[0])(monkeypatch)
    outcome = attempt(GRAPH)
    assert outcome.error is None and outcome.replays > 0
    assert not signs(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("case", [DEVICE, GRAPH], ids=str)
def test_other_rows_than_a_cpus_change_logits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with_ids(lambda ids: (ids - 1).clamp(min=0) if ids.is_cuda else None)(monkeypatch)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_logits(attempt(case))


def signs(outcome: Outcome) -> set[str]:
    """Kinds of findings, ``"wait"`` and ``"eager"`` as in ``Fault.kind``."""
    names = {finding.kind for finding in outcome.gpu.findings}
    if outcome.error is not None and not isinstance(outcome.error, (SimulationError, ValueError)):
        # A mistake in the fault itself is no sign of it.
        raise outcome.error
    if isinstance(outcome.error, ValueError) and "cuda:" in str(outcome.error):
        # The library looked where its tensors lie, and was told.
        names.add("device")
    if any("layer_step.py" not in wait.site for wait in outcome.gpu.waits_in("decode")):
        names.add("wait")
    if outcome.case.mode == "graph" and outcome.replays == 0:
        names.add("eager")
    return names
