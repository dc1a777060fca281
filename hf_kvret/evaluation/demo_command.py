"""``hf-kvret demo``: its options, and the way from them to tables and a picture."""

from __future__ import annotations

import argparse
import dataclasses

from hf_kvret.evaluation.arguments import (
    DTYPES,
    budget,
    check_device,
    file_path,
    length,
    names,
    store_name,
    whole_number,
)
from hf_kvret.evaluation.bundled import load_bundled_model
from hf_kvret.evaluation.command import add_place_options, add_seed_option
from hf_kvret.evaluation.demo import DemoSetup, run_demo
from hf_kvret.evaluation.help_text import HelpFormatter
from hf_kvret.evaluation.outputs import check_distinct, check_named_json, check_picture
from hf_kvret.evaluation.tables import demo_bars, demo_table, layer_table, plot_demo, write_json
from hf_kvret.stores import store_names


def add_demo_parser(commands: argparse._SubParsersAction) -> None:
    """Add ``demo`` to the program's commands."""
    parser = commands.add_parser(
        "demo",
        help="ask questions about a long document, with the bundled model",
        description="Read one long document with the bundled model, ask questions about it, and "
        "compare full attention with retrieval caches. Needs no network.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--context", type=length, default=16_384, help="document length in tokens, as 4096 or 4K"
    )
    parser.add_argument(
        "--caches",
        default="full,flat,paris,lrqk,ctkvr,a2ats,aqua",
        help="comma-separated, options after colons as lrqk:rank=16:store=resident",
    )
    parser.add_argument("--questions", type=whole_number(1), default=128, help="needles asked for")
    parser.add_argument("--top-k", type=budget, default=256, help="a count, or a share like 0.04")
    parser.add_argument(
        "--store", type=store_name, default="host", help=f"where cold rows live: {store_names()}"
    )
    add_place_options(parser)
    add_seed_option(parser, 0)
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--plot", type=file_path, metavar="FILE", help="write a picture (PNG, SVG, PDF)"
    )
    parser.set_defaults(run=run_demo_command)


def run_demo_command(options: argparse.Namespace) -> int:
    """Run the demo as the command line says; print what came out."""
    check_distinct(options)
    if options.json:
        check_named_json("--json", options.json, "demo")
    if options.plot:
        check_picture("--plot", options.plot)
    check_device(options.device)
    setup = DemoSetup(
        context=options.context,
        questions=options.questions,
        top_k=options.top_k,
        store=options.store,
        seed=options.seed,
    )
    model = load_bundled_model(DTYPES[options.dtype], options.device)
    results = run_demo(model, names(options.caches), setup)
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
