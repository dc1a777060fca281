"""Parts of a row that time measurements share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple, Self

from hf_kvret.lab.bench.floors import Floor
from hf_kvret.lab.bench.model_measurement import ModelMeasurement
from hf_kvret.lab.bench.timing import quartiles
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.evaluate.reader import Usage


class Line(NamedTuple):
    """Bytes or seconds by number of layers or sequences; estimates, not measurements.

    Attributes:
        slope: what one more adds.
        start: what is there without any: embedding, head, launch.
    """

    slope: float
    start: float

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Self:
        """The line through the first and the last of at least two points."""
        few, many = min(points), max(points)
        slope = (points[many] - points[few]) / (many - few)
        return cls(slope, points[many] - slope * many)

    def at(self, count: int) -> float:
        """The value of so many layers or sequences."""
        return self.slope * count + self.start

    def most(self, limit: float) -> int | None:
        """How many come to ``limit`` at most; None where more of them took no more."""
        return max(0, int((limit - self.start) // self.slope)) if self.slope > 0 else None


@dataclass(frozen=True)
class TimedSample:
    """What one turn of a time measurement brings home.

    Attributes:
        seconds: of each timed step or prompt.
        floor: of one of them, with the cache as it is after the last.
        usage: of the cache after the last.
        more: what else a row has, as it is in the last turn if nothing else is made of it.
    """

    seconds: list[float]
    floor: Floor
    usage: Usage
    more: Row


def timed_row(
    measurement: ModelMeasurement, tokens: int, samples: Mapping[int, Sequence[TimedSample]]
) -> Row:
    """The row of a time measurement, from its samples by number of layers.

    Seconds as median and quartiles, ``tokens`` (of one step or prompt) a second, bytes held, the
    floor; and in ``scaled`` the estimates for the whole model where fewer layers were measured.
    """
    rounds, bandwidth = samples[measurement.built], measurement.bandwidth
    usage, floor = rounds[-1].usage, rounds[-1].floor
    seconds = [value for one in rounds for value in one.seconds]
    low, middle, high = quartiles(seconds)
    least = floor.seconds(bandwidth)
    row: Row = {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "seconds_mean": fmean(seconds),
        "seconds_by_round": [median(one.seconds) for one in rounds],
        "timed": len(seconds),
        "floor_device_bytes": floor.device_bytes,
        "floor_host_bytes": floor.host_bytes,
        "floor_seconds": least,
        "time_over_floor": middle / least,
        "device_bandwidth": bandwidth.device,
        "host_bandwidth": bandwidth.host,
        "tokens_per_second": tokens / middle,
        "device_bytes": usage.device_bytes,
        "host_bytes": usage.host_bytes,
        "full_bytes": usage.full_bytes,
        **rounds[-1].more,
    }
    return row | ({"scaled": _scaled(measurement, tokens, samples)} if measurement.scaled else {})


def _scaled(
    measurement: ModelMeasurement, tokens: int, samples: Mapping[int, Sequence[TimedSample]]
) -> Row:
    """Estimates for the whole model.

    Seconds are None where the larger model was not slower, so that noise hides the layers.
    """
    layers, counts = measurement.whole.layers, list(samples)

    def whole(value: Callable[[TimedSample], float]) -> float:
        return Line.through({n: value(samples[n][-1]) for n in counts}).at(layers)

    floor = Floor(
        whole(lambda one: one.floor.device_bytes), whole(lambda one: one.floor.host_bytes)
    )
    least = floor.seconds(measurement.bandwidth)
    part: Row = {
        "layers": layers,
        "from_layers": sorted(counts),
        "seconds": None,
        "seconds_per_layer": None,
        "floor_device_bytes": floor.device_bytes,
        "floor_host_bytes": floor.host_bytes,
        "floor_seconds": least,
        "time_over_floor": None,
        "device_bytes": whole(lambda one: one.usage.device_bytes),
        "host_bytes": whole(lambda one: one.usage.host_bytes),
        "tokens_per_second": None,
    }
    line = Line.through({n: median(s for one in samples[n] for s in one.seconds) for n in counts})
    if line.slope > 0:
        seconds = line.at(layers)
        by_round = [
            Line.through({n: median(samples[n][number].seconds) for n in counts}).at(layers)
            for number in range(measurement.rounds)
        ]
        part |= {
            "seconds": seconds,
            "seconds_by_round": [min(by_round), max(by_round)],
            "seconds_per_layer": line.slope,
            "seconds_rest": line.start,
            "time_over_floor": seconds / least,
            "tokens_per_second": tokens / seconds,
        }
    return part
