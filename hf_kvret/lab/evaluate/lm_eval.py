"""``hf-kvret lm-eval``: lm-evaluation-harness with a retrieval cache."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hf_kvret.lab.program.program import example_lines
from hf_kvret.registry import registered_methods

if TYPE_CHECKING:
    from hf_kvret.lab.evaluate.lm_eval_model import Generation


def add_lm_eval_parser(commands: argparse._SubParsersAction) -> None:
    """Add ``lm-eval`` to the program's commands."""
    parser = commands.add_parser(
        "lm-eval",
        help="run lm-evaluation-harness with a retrieval cache",
        description="Run EleutherAI's lm-evaluation-harness on its tasks of output type "
        "generate_until, with a cache by name in --gen_kwargs. Everything after -- is lm-eval's. "
        "A task that would not use the cache is refused.",
        epilog=example_lines(
            [
                "hf-kvret lm-eval --cache-config '{\"top_k\": 256}' -- --model hf --model_args "
                "pretrained=MODEL --tasks gsm8k --gen_kwargs cache_implementation=paris"
            ]
        ),
    )
    parser.add_argument(
        "--cache-config",
        type=cache_options,
        action="append",
        metavar="JSON",
        help='options of the cache, as \'{"top_k": 256, "store": "host"}\' (default: its own), or '
        "full for lm-eval's own model hf; given twice, each run has a process of its own",
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="-- ...",
        help="lm-eval's own options, after two dashes",
    )
    parser.set_defaults(run=lambda options: _run_each(options.arguments, options.cache_config))


def _run_each(arguments: list[str], configs: Sequence[dict[str, Any] | str] | None) -> int:
    """Run lm-eval for each of ``configs``; returns the first status that is not 0, or 0.

    The documents of some tasks depend on what the process did before.
    """
    if len(configs or ()) < 2:
        return run_lm_eval(arguments, *(configs or ()))
    own = arguments[arguments[:1] == ["--"] :]
    for config in configs or ():
        text = config if isinstance(config, str) else json.dumps(config)
        print(f"--cache-config {text}", flush=True)
        words = ["-m", "hf_kvret", "lm-eval", "--cache-config", text, "--", *own]
        if status := subprocess.run([sys.executable, *words], check=False).returncode:
            return status
    return 0


def cache_options(text: str) -> dict[str, Any] | str:
    """A JSON object, or "full", for argparse."""
    if text == "full":
        return text
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: write '{{\"top_k\": 256}}'")
    return content


def run_lm_eval(arguments: Sequence[str], cache_config: dict[str, Any] | str | None = None) -> int:
    """Run lm-eval's command line with a retrieval cache; returns 0.

    Args:
        arguments: lm-eval's own, with ``--model hf`` and ``--gen_kwargs cache_implementation=...``.
            A ``--`` in front is dropped.
        cache_config: options of the cache; those in ``gen_kwargs`` stand beside them. "full": no
            cache of ours, and the ``gen_kwargs`` that name one are left out.

    Raises:
        ModuleNotFoundError: lm-eval is missing or too old.
        ValueError: no cache of ours is named, options that it doesn't have, another model than
            ``hf``, a task that asks for log-likelihoods, or nothing was generated.
    """
    words = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if importlib.util.find_spec("lm_eval") is None:
        raise ModuleNotFoundError("lm-eval needs lm-evaluation-harness: pip install 'lm-eval[hf]'")
    try:
        from lm_eval._cli import HarnessCLI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"lm-eval can't be used ({error}): pip install -U 'lm-eval[hf]', at least 0.4.10"
        ) from error
    from lm_eval.utils import setup_logging

    from hf_kvret.lab.evaluate.lm_eval_model import NAME, generations

    setup_logging()
    # lm-eval reads its arguments from ``sys.argv`` and nowhere else.
    with patch.object(sys, "argv", ["lm-eval", *words]):
        harness = HarnessCLI()
        options = harness.parse_args()
        _check(options)
        if isinstance(cache_config, str):
            kwargs = dict(options.gen_kwargs or {})
            for name in ("cache_implementation", "cache_config"):
                kwargs.pop(name, None)
            options.gen_kwargs = kwargs or None
            harness.execute(options)
            return 0
        options.gen_kwargs = _with_cache(options.gen_kwargs, cache_config or {})
        options.model = NAME
        before = len(generations())
        harness.execute(options)
    print(_account(generations()[before:]))
    return 0


def _account(batches: Sequence[Generation]) -> str:
    """A line that says what the cache did; ValueError when it did nothing at all."""
    if not batches:
        raise ValueError(
            "lm-eval generated nothing, so no cache was used: its answers came from --use_cache, "
            "or there were no samples"
        )
    names = ", ".join(sorted({batch.cache for batch in batches}))
    retrieved = [batch for batch in batches if batch.rows_cold]
    text = f"{names}: {len(batches)} batches generated, {len(retrieved)} of them with retrieval"
    if not retrieved:
        return (
            f"{text}. The texts were too short: below dense_below the cache is full attention. "
            "Give longer ones, or --cache-config '{\"dense_below\": 0}' and a small recent"
        )
    read = sum(batch.rows_read for batch in batches) / sum(batch.rows_cold for batch in batches)
    return f"{text}, {read:.2%} of the cold rows read"


def _check(options: argparse.Namespace) -> None:
    if getattr(options, "command", None) != "run":
        raise ValueError("lm-eval only runs tasks here: for anything else call lm_eval itself")
    if options.model != "hf":
        raise ValueError(
            f"--model {options.model}: only lm-eval's model hf generates with transformers, give "
            "--model hf"
        )


def _with_cache(gen_kwargs: Any, cache_config: dict[str, Any]) -> dict[str, Any]:
    """``gen_kwargs`` with the options of the cache in them, checked before a model is loaded."""
    merged = dict(gen_kwargs or {})
    name, methods = merged.get("cache_implementation"), registered_methods()
    if name not in methods:
        raise ValueError(
            f"--gen_kwargs has cache_implementation={name!r}: name one of {', '.join(methods)}, as "
            "--gen_kwargs cache_implementation=paris. For full attention call lm_eval itself"
        )
    named = merged.get("cache_config", {})
    if not isinstance(named, dict):
        raise ValueError(
            f"--gen_kwargs has cache_config={named!r}, no dict: give --cache-config "
            "'{\"top_k\": 256}' in front of --"
        )
    twice = sorted({*named} & {*cache_config})
    if twice:
        raise ValueError(f"{twice[0]} is both in --cache-config and in --gen_kwargs: drop one")
    if config := named | cache_config:
        methods[name].Config.from_options(**config)
        merged["cache_config"] = config
    return merged
