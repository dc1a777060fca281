"""Whether a cache fits beside a model's weights, and how much more of it would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_kvret.lab.bench.shapes import WeightBytes
from hf_kvret.lab.plan.filling import Held, Predictor

# No cache is asked for more tokens.
_MOST_TOKENS = 1 << 30
_STEPS = 64


@dataclass(frozen=True)
class Machine:
    """Memory that there is, and how fast it is read.

    Attributes:
        device: bytes of device memory.
        host: bytes of host memory; None: the device is the CPU, and all is in its memory.
        reserve: bytes of device memory that stay free for passes.
        origin: whose memory that is, in words.
        device_speed, host_speed, bus_speed: bytes a second.
    """

    device: int
    host: int | None
    reserve: int
    origin: str
    device_speed: float
    host_speed: float
    bus_speed: float

    def fits(self, weights: WeightBytes, held: Held) -> bool:
        """Whether weights and cache fit at the same time."""
        room = self.device - self.reserve - weights.held
        if self.host is None:
            return held.device + held.host <= room
        return held.device <= room and held.host <= self.host

    def seconds(self, weights: WeightBytes, held: Held, batch: int) -> float:
        """What reading all that a decode step reads takes at full speed."""
        near = weights.read + batch * weights.row + held.read_device
        if self.host is None:
            return (near + held.read_bus + held.read_cpu) / self.device_speed
        far = held.read_bus / self.bus_speed + held.read_cpu / self.host_speed
        return near / self.device_speed + far


def largest_batch(
    machine: Machine, weights: WeightBytes, predictor: Predictor, context: int
) -> int:
    """The most sequences of ``context`` tokens that fit; 0 for none."""
    one = predictor.at(context)
    return _largest(lambda batch: machine.fits(weights, one.of_batch(batch)), 1 << 20)


def largest_context(
    machine: Machine, weights: WeightBytes, predictor: Predictor, batch: int
) -> int:
    """The most tokens of each of ``batch`` sequences that fit; 0 for none.

    Below ``predictor.even_len`` it is a multiple of a 64th of that, rounded down.
    """

    def fits(length: int) -> bool:
        return machine.fits(weights, predictor.at(length).of_batch(batch))

    even_len, step = predictor.even_len, predictor.even_len // _STEPS
    if not fits(even_len):
        return step * _largest(lambda count: fits(count * step), _STEPS)
    return even_len + _largest(lambda tokens: fits(even_len + tokens), _MOST_TOKENS)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to ``most`` that ``fits``, if all smaller ones do; 0 for none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
