"""The command line: ``hf-kvret demo | eval | bench | calibrate | inspect | lm-eval | report``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from hf_kvret.benchmark.command import MEASUREMENTS, add_bench_parser
from hf_kvret.calibration.command import add_calibrate_parser
from hf_kvret.evaluation.command import DTYPES, add_eval_parser, budget, device_name
from hf_kvret.evaluation.lm_eval import add_lm_eval_parser
from hf_kvret.evaluation.report import add_report_parser
from hf_kvret.evaluation.tasks import TASKS
from hf_kvret.stores import store_names

# 128 and the number of SIGINT, as shells have it.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. A user's mistake prints one line, not a trace.

    So does Ctrl-C on the command line, with status 130. Callers who pass ``arguments`` get the
    KeyboardInterrupt, which may be meant for them.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    try:
        return options.run(options)
    except KeyboardInterrupt:
        if arguments is not None:
            raise
        # A progress bar may have left the cursor in the middle of a line.
        print(f"\nhf-kvret: interrupted{_what_is_kept(options)}", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"hf-kvret: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-kvret", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    demo = commands.add_parser(
        "demo",
        help="ask questions about a long document, with the bundled model",
        description="Read one long document with the bundled model, ask questions about it, and "
        "compare full attention with retrieval caches. Needs no network.",
    )
    demo.add_argument("--context", type=int, default=16_384, help="document length in tokens")
    demo.add_argument(
        "--caches",
        default="full,flat,paris,lrqk,ctkvr,a2ats,aqua",
        help="comma-separated, options after colons as lrqk:rank=16:store=resident",
    )
    demo.add_argument("--questions", type=int, default=128, help="needles asked for")
    demo.add_argument("--top-k", type=budget, default=256, help="a count, or a share like 0.04")
    demo.add_argument("--store", default="host", help=f"where cold rows live: {store_names()}")
    demo.add_argument("--dtype", choices=DTYPES, default="float32")
    demo.add_argument(
        "--device", type=device_name, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    demo.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (PNG, SVG, PDF)")
    demo.set_defaults(run=_demo)
    add_eval_parser(commands)
    add_bench_parser(commands)
    add_lm_eval_parser(commands)
    add_calibrate_parser(commands)
    tasks = {f"eval {name}": task for name, task in TASKS.items()}
    add_report_parser(commands, {**tasks, **MEASUREMENTS})
    return parser


def _what_is_kept(options: argparse.Namespace) -> str:
    """What an interrupted command leaves to go on from, as the end of a sentence."""
    measures = options.command in ("eval", "bench")
    learns = options.command == "calibrate" and (options.out / ".parts").is_dir()
    if learns or (measures and options.json):
        return ": the same command goes on where it stopped"
    return ", and nothing is kept: with --json FILE the same command goes on" if measures else ""


def _demo(options: argparse.Namespace) -> int:
    from hf_kvret.evaluation.bundled import load_bundled_model
    from hf_kvret.evaluation.demo import DemoSetup, run_demo
    from hf_kvret.evaluation.plots import require_matplotlib
    from hf_kvret.evaluation.tables import (
        demo_bars,
        demo_table,
        layer_table,
        plot_demo,
        write_json,
    )

    if options.plot:
        require_matplotlib()
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: no CUDA device here; use --device cpu")
    names = [name.strip() for name in options.caches.split(",") if name.strip()]
    setup = DemoSetup(
        context=options.context,
        questions=options.questions,
        top_k=options.top_k,
        store=options.store,
        seed=options.seed,
    )
    model = load_bundled_model(DTYPES[options.dtype], options.device)
    results = run_demo(model, names, setup)
    print(
        f"\n{setup.questions} questions about {setup.context:,} tokens, {options.dtype}, "
        f"top_k={setup.top_k}, store={setup.store}\n"
    )
    print(demo_table(results))
    if any(row.recall_by_layer for row in results):
        print(f"\n{layer_table(results)}")
    print(f"\n{demo_bars(results)}")
    if options.json:
        described = dataclasses.asdict(setup) | {"dtype": options.dtype, "device": options.device}
        write_json(options.json, "demo", described, results)
        print(f"\nwrote {options.json}")
    if options.plot:
        plot_demo(options.plot, results, setup.context)
        print(f"wrote {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
