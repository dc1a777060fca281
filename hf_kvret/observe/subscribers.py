"""Who is subscribed to the steps of a cache's layers, by its options."""

from __future__ import annotations

from collections.abc import Sequence

from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.record import Subscriber
from hf_kvret.observe.counters import LayerCounters
from hf_kvret.observe.missed_mass import MissedMass, MissedMassWarning
from hf_kvret.observe.recall import RecallMeter
from hf_kvret.options.config import RetrievalConfig


def subscribe(layers: Sequence[RetrievalLayer], options: RetrievalConfig) -> MissedMassWarning:
    """Give the layers of a new cache what its options ask for; returns the warning they share."""
    warning = MissedMassWarning(options)
    for layer in layers:
        subscribers: list[Subscriber] = [LayerCounters()]
        if options.track_recall:
            subscribers.append(RecallMeter())
        if options.track_recall or options.warn_lost_mass is not None:
            last = layer is layers[-1]
            missed = MissedMass(options.track_recall, warning if last else None)
            warning.layers[layer.of_model.number] = missed
            subscribers.append(missed)
        layer.subscribers = tuple(subscribers)
    return warning
