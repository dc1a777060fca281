"""Decode steps captured once as CUDA graphs and replayed."""

from hf_kvret.replay.graph import DecodeGraph, why_not

__all__ = ["DecodeGraph", "why_not"]
