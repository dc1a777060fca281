"""Parts of a row that time measurements share."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_kvret.benchmark.floors import Floor
from hf_kvret.benchmark.measure import Bench
from hf_kvret.benchmark.scaling import scale, scale_rounds
from hf_kvret.benchmark.timing import quartiles
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


def timed_row(
    bench: Bench, tokens: int, samples: Mapping[int, Sequence[TimedSample]]
) -> dict[str, Any]:
    """The row of a time measurement, from its samples by number of layers.

    Seconds as median and quartiles, ``tokens`` (of one step or prompt) a second, bytes held, the
    floor; and in ``scaled`` the estimates for the whole model where fewer layers were measured.
    """
    taken = samples[bench.subjects[0].layers]
    usage = taken[-1].usage
    row = timed_part(bench, [sample.seconds for sample in taken], taken[-1].floor)
    row |= {
        "tokens_per_second": tokens / row["seconds"],
        "device_bytes": usage.device_bytes,
        "host_bytes": usage.host_bytes,
        "full_bytes": usage.full_bytes,
    }
    if bench.scaled:
        row["scaled"] = scaled_part(
            bench,
            {n: [sample.seconds for sample in samples[n]] for n in samples},
            {n: samples[n][-1].floor for n in samples},
            {n: samples[n][-1].usage for n in samples},
        )
        seconds = row["scaled"]["seconds"]
        row["scaled"]["tokens_per_second"] = None if seconds is None else tokens / seconds
    return row


def timed_part(bench: Bench, rounds: Sequence[Sequence[float]], floor: Floor) -> dict[str, Any]:
    """Median, quartiles, mean and floor of the seconds of all ``rounds``, all measured."""
    seconds = [value for taken in rounds for value in taken]
    low, middle, high = quartiles(seconds)
    least = floor.seconds(bench.bandwidth)
    return {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "seconds_mean": statistics.fmean(seconds),
        "seconds_by_round": [statistics.median(taken) for taken in rounds],
        "timed": len(seconds),
        "floor_device_bytes": floor.device_bytes,
        "floor_host_bytes": floor.host_bytes,
        "floor_seconds": least,
        "time_over_floor": middle / least,
        "device_bandwidth": bench.bandwidth.device,
        "host_bandwidth": bench.bandwidth.host,
    }


def scaled_part(
    bench: Bench,
    rounds: Mapping[int, Sequence[Sequence[float]]],
    floors: Mapping[int, Floor],
    usages: Mapping[int, Usage],
) -> dict[str, Any]:
    """Estimates for the whole model; the mappings go by number of layers and have two entries.

    Seconds are None where the larger model was not slower, so that noise hides the layers.
    """
    few, many = sorted(rounds)
    layers = bench.shape.layers
    medians = {n: quartiles([s for taken in rounds[n] for s in taken])[1] for n in rounds}

    def whole(values: Mapping[int, float]) -> float:
        return scale((few, values[few]), (many, values[many]), layers).value

    device = whole({n: floors[n].device_bytes for n in floors})
    host = whole({n: floors[n].host_bytes for n in floors})
    least = Floor(device, host).seconds(bench.bandwidth)
    part: dict[str, Any] = {
        "layers": layers,
        "from_layers": [few, many],
        "seconds": None,
        "floor_device_bytes": device,
        "floor_host_bytes": host,
        "floor_seconds": least,
        "time_over_floor": None,
        "device_bytes": whole({n: usages[n].device_bytes for n in usages}),
        "host_bytes": whole({n: usages[n].host_bytes for n in usages}),
    }
    estimate = scale((few, medians[few]), (many, medians[many]), layers)
    if estimate.per_layer > 0:
        by_round = {n: [statistics.median(taken) for taken in rounds[n]] for n in rounds}
        spread = scale_rounds((few, by_round[few]), (many, by_round[many]), layers)
        part |= {
            "seconds": estimate.value,
            "seconds_by_round": list(spread),
            "seconds_per_layer": estimate.per_layer,
            "seconds_rest": estimate.rest,
            "time_over_floor": estimate.value / least,
        }
    return part
