"""LayerStep: a layer's part in decode steps that are captured and replayed."""

from __future__ import annotations

from operator import add

from hf_kvret.core.index import CapturableIndex, Index, capture_obstacle_of
from hf_kvret.core.layer import RetrievalLayer
from hf_kvret.core.regions import Regions
from hf_kvret.core.window import Place


class LayerStep:
    """What one layer must be told when its step runs without Python, or breaks off.

    Python runs once, when the step is captured, and notes the first replay on the host; after each
    of the others ``replayed`` does.
    """

    def __init__(self, layer: RetrievalLayer) -> None:
        self.layer = layer
        self._before: tuple[int, ...] = ()
        self._length = 0
        self._counts: tuple[int, ...] = ()

    @property
    def regions(self) -> Regions:
        """Those of the layer, which holds tokens."""
        assert self.layer.regions is not None, "a layer without tokens has no step to capture"
        return self.layer.regions

    def is_plain(self) -> bool:
        """Whether a step of one token only appends it and selects: nothing is moved or built.

        So the step after it does the same on the same memory, one column further.
        """
        regions = self.layer.regions
        if regions is None or self.layer.waiting or not regions.length or regions.step_flushes():
            return False
        window = regions.window
        roomy = window.sink + window.length < window.capacity
        return roomy and (regions.built or not regions.cold_len)

    @property
    def capture_obstacle(self) -> str | None:
        """Why the layer's steps can't be captured; None: they can."""
        if self.layer.config.track_recall:
            return "track_recall=True reads all keys at every step, for study"
        regions = self.regions
        index = regions.index
        if not regions.cold_len or regions.store is None:
            # Nothing is selected yet, but what sees each pass would not see those replayed.
            sees = index is not None and type(index).on_forward is not Index.on_forward
            return capture_obstacle_of(index) if sees or regions.needs_positions else None
        return capture_obstacle_of(index) or regions.store.capture_obstacle

    def set_place(self, place: Place | None) -> None:
        """Where the token of a step goes that is to be captured; None: behind the others."""
        self.regions.window.place = place

    def before_capture(self) -> None:
        """A step is about to be captured: index and store are told."""
        if isinstance(self.regions.index, CapturableIndex):
            self.regions.index.before_capture()
        if self.regions.store is not None:
            self.regions.store.before_capture()
        self._length, self._before = self.regions.window.length, self.layer.counters.numbers()

    def captured(self) -> None:
        """It was: remember what it counted."""
        now = self.layer.counters.numbers()
        self._counts = tuple(new - old for new, old in zip(now, self._before, strict=True))

    def capture_failed(self) -> None:
        """It was not, and the device did nothing: the host is put back to before the capture."""
        self.layer.waiting = False
        if isinstance(self.regions.index, CapturableIndex):
            self.regions.index.capture_failed()
        self.regions.window.length = self._length
        self.layer.counters.set(self._before)

    def replayed(self) -> None:
        """The captured step was replayed."""
        self.regions.window.length += 1
        if isinstance(self.regions.index, CapturableIndex):
            self.regions.index.replayed()
        counters = self.layer.counters
        counters.set(tuple(map(add, counters.numbers(), self._counts)))
