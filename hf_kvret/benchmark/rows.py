"""Parts of a row that time measurements share, and estimates for all layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hf_kvret.benchmark.floors import Floor
from hf_kvret.benchmark.model_measurement import ModelMeasurement
from hf_kvret.benchmark.timing import quartiles
from hf_kvret.evaluation.measurement import Row
from hf_kvret.evaluation.reader import Usage


@dataclass(frozen=True)
class TimedSample:
    """What one turn of a time measurement brings home.

    Attributes:
        seconds: of each timed step or prompt.
        floor: of one of them, with the cache as it is after the last.
        usage: of the cache after the last.
    """

    seconds: list[float]
    floor: Floor
    usage: Usage


@dataclass(frozen=True)
class Scaled:
    """An estimate for the whole model; not a measurement.

    Attributes:
        value: ``per_layer * layers + rest``.
        per_layer: what one layer adds.
        rest: what is there without layers: embedding, head, launch.
    """

    value: float
    per_layer: float
    rest: float


def scale(values: Mapping[int, float], layers: int) -> Scaled:
    """What ``layers`` layers would take, by the straight line through two of ``values``.

    These go by number of layers: the smallest and the largest count.
    """
    few, many = min(values), max(values)
    per_layer = (values[many] - values[few]) / (many - few)
    rest = values[many] - per_layer * many
    return Scaled(per_layer * layers + rest, per_layer, rest)


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
    }
    return row | ({"scaled": _scaled(measurement, tokens, samples)} if measurement.scaled else {})


def _scaled(
    measurement: ModelMeasurement, tokens: int, samples: Mapping[int, Sequence[TimedSample]]
) -> Row:
    """Estimates for the whole model.

    Seconds are None where the larger model was not slower, so that noise hides the layers.
    """
    layers = measurement.whole.layers

    def whole(value: Callable[[TimedSample], float]) -> float:
        return scale({count: value(samples[count][-1]) for count in samples}, layers).value

    floor = Floor(
        whole(lambda one: one.floor.device_bytes), whole(lambda one: one.floor.host_bytes)
    )
    least = floor.seconds(measurement.bandwidth)
    part: Row = {
        "layers": layers,
        "from_layers": sorted(samples),
        "seconds": None,
        "floor_device_bytes": floor.device_bytes,
        "floor_host_bytes": floor.host_bytes,
        "floor_seconds": least,
        "time_over_floor": None,
        "device_bytes": whole(lambda one: one.usage.device_bytes),
        "host_bytes": whole(lambda one: one.usage.host_bytes),
        "tokens_per_second": None,
    }
    all_rounds = {n: [value for one in samples[n] for value in one.seconds] for n in samples}
    estimate = scale({n: median(values) for n, values in all_rounds.items()}, layers)
    if estimate.per_layer > 0:
        by_round = [
            scale({n: median(one.seconds) for n, one in zip(samples, ones, strict=True)}, layers)
            for ones in zip(*samples.values(), strict=True)
        ]
        values = [one.value for one in by_round]
        part |= {
            "seconds": estimate.value,
            "seconds_by_round": [min(values), max(values)],
            "seconds_per_layer": estimate.per_layer,
            "seconds_rest": estimate.rest,
            "time_over_floor": estimate.value / least,
            "tokens_per_second": tokens / estimate.value,
        }
    return part
