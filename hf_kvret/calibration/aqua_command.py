"""Options of ``hf-kvret calibrate aqua``."""

from __future__ import annotations

import argparse

from hf_kvret.calibration.aqua import (
    BITS,
    GROUPS,
    KEY_INPUTS,
    SPACES,
    VALUE_INPUTS,
    AquaCalibration,
)
from hf_kvret.calibration.aqua_coding import BACKBONES
from hf_kvret.calibration.aqua_predictors import PREDICTORS
from hf_kvret.evaluation.arguments import number, whole_number


def add_aqua_options(parser: argparse.ArgumentParser) -> None:
    """Add what is AQUA-KV's own; defaults are those of ``AquaCalibration``."""
    usual = AquaCalibration()
    parser.add_argument(
        "--bits",
        type=int,
        choices=BITS,
        default=usual.bits,
        help="of residuals, served unless a cache is given others; 16: not coded",
    )
    parser.add_argument(
        "--first-bits",
        type=anchor_bits,
        choices=(*BITS, "auto"),
        default=usual.first_bits,
        help="of anchors; 16: left as they are; auto: 4 or 16, by the error",
    )
    parser.add_argument(
        "--group",
        type=int,
        choices=GROUPS,
        help="numbers that share a scale; default: as many as fit, up to 1024",
    )
    parser.add_argument("--backbone", choices=BACKBONES, default=usual.backbone, help="of codes")
    parser.add_argument("--predictor", choices=PREDICTORS, default=usual.predictor, help="its kind")
    parser.add_argument("--rank", type=whole_number(1), default=usual.rank, help="of low_rank")
    parser.add_argument(
        "--hidden", type=whole_number(2), help="units of mlp; default: twice its outputs"
    )
    parser.add_argument(
        "--steps", type=whole_number(0), default=usual.steps, help="of training of mlp"
    )
    parser.add_argument(
        "--predictor-bits", type=int, choices=(16, 4), default=16, help="4 by GPTQ, not for mlp"
    )
    parser.add_argument(
        "--ridge", type=number(0), default=usual.ridge, help="in mean variances of an input"
    )
    parser.add_argument(
        "--sinks",
        type=whole_number(0),
        default=usual.sinks,
        help="first tokens of a sequence, left out",
    )
    parser.add_argument("--space", choices=SPACES, default=usual.space, help="of keys, and RoPE")
    parser.add_argument(
        "--anchor-every",
        type=whole_number(1),
        metavar="LAYERS",
        help="also later layers without predictors",
    )
    parser.add_argument("--anchor-mean", action="store_true", help="take the mean off in anchors")
    parser.add_argument(
        "--key-inputs", choices=KEY_INPUTS, default=usual.key_inputs, help="none: for study"
    )
    parser.add_argument(
        "--value-inputs", choices=VALUE_INPUTS, default=usual.value_inputs, help="for study"
    )


def aqua_calibration(options: argparse.Namespace) -> AquaCalibration:
    """As the command line says.

    Raises:
        ValueError: options that don't go together.
    """
    if options.hidden is not None and options.predictor != "mlp":
        raise ValueError(
            f"--hidden {options.hidden} is of --predictor mlp, and it is {options.predictor}: "
            "leave --hidden out, or give --predictor mlp"
        )
    return AquaCalibration(
        bits=options.bits,
        first_bits=options.first_bits,
        group=options.group,
        backbone=options.backbone,
        predictor=options.predictor,
        rank=options.rank,
        hidden=options.hidden,
        steps=options.steps,
        predictor_bits=options.predictor_bits,
        ridge=options.ridge,
        sinks=options.sinks,
        space=options.space,
        anchor_every=options.anchor_every,
        anchor_mean=options.anchor_mean,
        key_inputs=options.key_inputs,
        value_inputs=options.value_inputs,
        seed=options.seed,
    )


def anchor_bits(text: str) -> int | str:
    """A number of bits, or ``auto``; the parser compares it with its choices."""
    if text != "auto" and not text.isdecimal():
        allowed = ", ".join(map(str, BITS))
        raise argparse.ArgumentTypeError(f"{text!r} is none of {allowed} bits, and not auto")
    return text if text == "auto" else int(text)
