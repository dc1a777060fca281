"""Decode steps captured once as CUDA graphs and replayed."""

from hf_kvret.replay.graph import DecodeGraph, why_not
from hf_kvret.replay.replayable import REPLAYABLE

__all__ = ["REPLAYABLE", "DecodeGraph", "why_not"]
