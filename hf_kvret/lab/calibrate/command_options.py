"""Options of ``hf-kvret calibrate METHOD``: those of all methods, and each method's own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.aqua import AquaCalibration
from hf_kvret.lab.program.arguments import (
    file_path,
    length,
    length_or_none,
    number,
    share,
    whole_number,
)
from hf_kvret.lab.program.common_options import (
    count_option,
    device_map_option,
    device_option,
    dtype_option,
    seed_option,
)
from hf_kvret.lab.program.options import option
from hf_kvret.methods.a2ats.learned import CODEWORD_DTYPES
from hf_kvret.methods.aqua.coding import BITS, GROUPS
from hf_kvret.methods.aqua.learned import SPACES

_AQUA = AquaCalibration()


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of every method: a model, texts to learn from, and where the artifact goes.

    A subclass has those of its ``Calibration``, by the same names.
    """

    Calibration: ClassVar[type[Any]]
    summary: ClassVar[str]
    description: ClassVar[str]
    usual_uuid_tokens: ClassVar[int]

    model: str = option(
        help="a folder, a hub id, or a model of ours: reference, needle (documents of its own)"
    )
    text: Path | None = option(None, "text to learn from", kind=file_path, metavar="FILE")
    dataset: str | None = option(
        None, "a data set on the hub instead, as ID or ID:CONFIGURATION", metavar="ID"
    )
    tokens: int = option(64 * 1024, "of text, held-out included", kind=length)
    uuid_tokens: int | None = option(
        None,
        "of random UUIDs beside text; 0 for none; 16K for a2ats and none for others if left out",
        kind=length_or_none,
    )
    length: int = option(4096, "most tokens of a sequence", kind=length)
    held_out: float = option(
        0.1, "share of the text that only measures quality", kind=share(zero=True)
    )
    name: str | None = option(
        None, "of the model in the artifact; default: its hub id or folder's name"
    )
    out: Path = option(help="folder of the artifact", kind=file_path, metavar="DIR")
    dtype: str = dtype_option()
    device: str = device_option()
    device_map: str | None = device_map_option()
    seed: int = seed_option(0)

    def calibration(self) -> Any:
        """The method's own part; ValueError for options that don't go together."""
        mine = {one.name for one in fields(self)}
        shared = [one.name for one in fields(self.Calibration) if one.name in mine]
        return self.Calibration(**{name: getattr(self, name) for name in shared})


@dataclass(frozen=True, kw_only=True)
class A2ATSOptions(CalibrateOptions):
    """A2ATS: codebooks of keys before RoPE."""

    Calibration: ClassVar[type[Any]] = A2ATSCalibration
    summary: ClassVar[str] = "codebooks of keys before RoPE"
    description: ClassVar[str] = (
        "Learn codebooks of each KV head from keys before RoPE, one for all inputs, with errors "
        "counted as queries see them (A2ATS, equations 13 to 15)."
    )
    usual_uuid_tokens: ClassVar[int] = 16 * 1024

    codewords: int = count_option(4096, "of each KV head")
    codeword_dtype: str = option("bfloat16", "as they are saved", choices=CODEWORD_DTYPES)
    distance: int = option(2048, "b, of all tokens that are not local", kind=whole_number(0))
    rounds: int = option(300, "of k-means at most", kind=whole_number(0))
    space: str = option(
        "windowed", "rotated: for positions of three parts", choices=("windowed", "rotated")
    )


def anchor_bits(text: str) -> int | str:
    """A number of bits, or ``auto``; the parser compares it with its choices."""
    if text != "auto" and not text.isdecimal():
        choices = ", ".join(map(str, BITS))
        raise argparse.ArgumentTypeError(f"{text!r} is none of {choices} bits, and not auto")
    return text if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class AquaOptions(CalibrateOptions):
    """AQUA-KV: predictors; fields are those of ``AquaCalibration``, and so are defaults."""

    Calibration: ClassVar[type[Any]] = AquaCalibration
    summary: ClassVar[str] = "predictors of a layer's keys and values from those of the layer below"
    description: ClassVar[str] = (
        "Learn what predicts a layer's keys and values from those of the layer below; the cache "
        "keeps what is left, in few bits (AQUA-KV)."
    )
    usual_uuid_tokens: ClassVar[int] = 0

    bits: int = option(
        _AQUA.bits,
        "of residuals, served unless a cache is given others; 16: not coded",
        choices=BITS,
    )
    first_bits: int | str = option(
        _AQUA.first_bits,
        "of the first layer; 16: left as it is; auto: 4 or 16, by the error",
        kind=anchor_bits,
        choices=(*BITS, "auto"),
    )
    group: int | None = option(
        None,
        "numbers that share a scale; default: as many as fit, up to 1024",
        kind=int,
        choices=GROUPS,
    )
    ridge: float = option(_AQUA.ridge, "in mean variances of an input", kind=number(0))
    sinks: int = option(_AQUA.sinks, "first tokens of a sequence, left out", kind=whole_number(0))
    space: str = option(_AQUA.space, "of keys, and RoPE", choices=SPACES)
    anchor_mean: bool = option(False, "take the mean off in the first layer")


METHODS: tuple[type[CalibrateOptions], ...] = (A2ATSOptions, AquaOptions)
"""The methods that are calibrated."""
