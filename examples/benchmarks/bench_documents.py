"""Seconds to the first token of prompts that begin like earlier ones: with a shelf, by the same
method without one (anew), and with transformers' own cache (full). A chat gives the whole talk in
each turn, as a client without a session does; a document is asked one question after the other. All
variants get the same prompt in turns, and each round begins with an empty shelf.

The time is taken by a streamer when generate hands out the first token. Loading from the shelf is
in it; what is put on the shelf behind it is in the time of the call. What is loaded comes
from the system's page cache, as far as that holds it. A short prompt before the first round warms
all up, and has the model's weights hashed, once a process.

    hf-kvret bench documents --model reference --json documents.json
    hf-kvret bench documents --context 32K --method paris:top_k=512 --llama-cpp llama-server
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from document_prompts import SCENARIOS, Call, Prompts, timed_answer
from llama_bench import LLAMA_CPP, check_architecture, find_gguf, write_gguf
from llama_server import LlamaServer, find_server, llama_server
from tqdm import tqdm
from transformers import DynamicCache

from hf_kvret.lab.bench import timed
from hf_kvret.lab.evaluate.bundled import default_model
from hf_kvret.lab.evaluate.caches import CacheChoice, choose_cache
from hf_kvret.lab.evaluate.measurement import CheckFailed, Measurement, Progress, Row
from hf_kvret.lab.evaluate.needles import choose_wording
from hf_kvret.lab.evaluate.reader import check_positions
from hf_kvret.lab.evaluate.subject import Subject, load_subject
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import DTYPES, check_device, length
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.models.versions import as_argument
from hf_kvret.shelf import Shelf

_WARM_UP = 160


Ask = Callable[[torch.Tensor], Call]
Round = Sequence[Mapping[str, Call]]
"""The calls of each prompt, by variant."""


@dataclass(frozen=True, kw_only=True)
class Documents(Measurement):
    """Seconds to the first token with a shelf and without, in a chat and of questions to a text."""

    command = "bench"
    name = "documents"
    smallest = (
        "--context 300 --message 160 --question 70 --turns 2 --questions 2 --shelf-step 128 "
        "--new-tokens 2 --repeats 1 --method paris:top_k=100000:recent=64:flush=64:dense_below=0"
    )

    model: str = option(default_model(), "a folder, a hub id, or reference or smollm2")
    method: str = option("paris", "and its options after colons, as paris:top_k=256")
    context: int = option(6144, "tokens of the document, as 8192 or 8K", kind=length)
    question: int = option(128, "tokens of a question to it", kind=length)
    questions: int = common.count_option(20, "to the document")
    message: int = option(768, "tokens of a user's message in the chat", kind=length)
    turns: int = common.count_option(8, "messages of the chat")
    new_tokens: int = common.count_option(8, "most tokens of an answer")
    shelf_step: int = common.count_option(512, "new tokens from which on a prompt is put")
    repeats: int = common.repeats_option(3, "rounds of each scenario")
    llama_cpp: str | None = option(None, "beside llama.cpp: its llama-server", metavar="PROGRAM")
    dtype: str = common.dtype_option()
    device: str = common.device_option()
    seed: int = common.seed_option()

    def check(self) -> None:
        check_device(self.device)
        if self._choice.options is None:
            raise ValueError(f"--method {self.method}: only caches of hf-kvret go on a shelf")
        for name in ("turns", "questions"):
            if getattr(self, name) < 2:
                raise ValueError(f"--{name} 1: a shelf serves the second one, give 2 or more")
        shortest = min(self.message, self.context + self.question)
        if self.shelf_step > shortest:
            raise ValueError(
                f"--shelf-step {self.shelf_step}: a first prompt has {shortest} tokens, and would "
                "not be put on the shelf; give a smaller step"
            )
        if self.llama_cpp is not None:
            if self.device != "cpu":
                raise ValueError("--llama-cpp is measured on a CPU: give --device cpu")
            find_server(self.llama_cpp)
            find_gguf()

    def setup(self) -> dict[str, Any]:
        names = ("context", "question", "questions", "message", "turns", "new_tokens")
        more = ("method", "shelf_step", "repeats", "device", "seed")
        machine = ("processor", "threads", "versions")
        return self._subject.describe() | timed.describe(self, *names, *more, machine=machine)

    @property
    def variants(self) -> dict[str, str]:
        """The cache of each variant."""
        usual = {"shelf": self.method, "anew": self.method, "full": "full"}
        return usual if self.llama_cpp is None else usual | {LLAMA_CPP: LLAMA_CPP}

    def cells(self) -> list[Cell]:
        return [
            {"cache": cache, "scenario": scenario, "call": call, "variant": variant}
            for scenario in SCENARIOS
            for call in ("first", "later")
            for variant, cache in self.variants.items()
        ]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """All cells of a scenario, whose variants take turns, where one of them waits."""
        waiting = {cell["scenario"]: None for cell in self.waiting(results)}
        # Mistakes are named before anything is read.
        for scenario in waiting:
            check_positions(self._subject.model, self._prompts.longest(scenario))
            self._prompts.texts(scenario)
        if waiting and self.llama_cpp is not None:
            check_architecture(self._subject.model.config, self.model, "--llama-cpp")
        for scenario in waiting:
            yield [cell for cell in self.cells() if cell["scenario"] == scenario]

    def count(self, results: Results) -> int:
        return sum(map(len, self.plan(results)))

    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """The times of a scenario."""
        scenario, rounds = group[0]["scenario"], []
        lengths: Sequence[int] = ()
        more: dict[str, Row] = {}
        with self._server(self._prompts.longest(scenario)) as server:
            self._warm_up(server)
            for number in tqdm(range(self.repeats), desc=scenario, unit="round", leave=False):
                with TemporaryDirectory(prefix="hf-kvret-") as folder:
                    asks = self._asks(Path(folder), server)
                    lengths, calls = self._round(scenario, asks, number)
                    rounds.append(calls)
                    nbytes = sum(one.nbytes for one in Shelf(folder).entries())
                if not nbytes:
                    raise CheckFailed(f"{self.method}: nothing was put on the shelf")
                more = {"shelf": {"bytes": nbytes}}
                if server is not None:
                    more[LLAMA_CPP] = {"bytes": server.nbytes, "build": server.build}
        return [_row(cell, rounds, lengths) | more.get(cell["variant"], {}) for cell in group]

    @cached_property
    def _subject(self) -> Subject:
        return load_subject(self.model, DTYPES[self.dtype], self.device)

    @cached_property
    def _choice(self) -> CacheChoice:
        return choose_cache(self.method)

    @cached_property
    def _prompts(self) -> Prompts:
        wording = choose_wording(None, self._subject, self.name, None, self.new_tokens)
        counts = self.question, self.questions, self.message, self.turns, self.new_tokens
        return Prompts(wording, self.context, *counts, self.seed)

    @contextmanager
    def _server(self, most: int) -> Iterator[LlamaServer | None]:
        """llama.cpp with this model, for texts of ``most`` tokens; None where nobody asked."""
        if self.llama_cpp is None:
            yield None
            return
        with TemporaryDirectory(prefix="hf-kvret-") as folder:
            model = Path(folder) / "model.gguf"
            write_gguf(model, self._subject.model, vocabulary=True)
            with llama_server(find_server(self.llama_cpp), model, Path(folder), most) as server:
                yield server

    def _asks(self, folder: Path, server: LlamaServer | None) -> dict[str, Ask]:
        """What answers a prompt, by variant; nothing was asked before."""
        options: Any = self._choice.options
        usual: dict[str, Any] = asdict(options)
        shelf = {"shelf": str(folder), "shelf_step": self.shelf_step}
        ask = partial(timed_answer, self._subject.model, self.new_tokens)
        ours = partial(ask, cache_implementation=self._choice.method)
        config = self._subject.model.config
        asks: dict[str, Ask] = {
            "shelf": partial(ours, cache_config=usual | shelf),
            "anew": partial(ours, cache_config=usual),
            "full": lambda ids: ask(ids, **as_argument(DynamicCache(config=config))),
        }
        if server is not None:
            server.forget()
            words = self.new_tokens, self.shelf_step
            asks[LLAMA_CPP] = lambda ids: server.ask(ids.tolist(), *words)
        return asks

    def _round(
        self, scenario: str, asks: Mapping[str, Ask], number: int
    ) -> tuple[list[int], Round]:
        """Lengths of the prompts, which come one after the other, and their calls."""
        text, additions = self._prompts.texts(scenario)
        order, lengths, calls = deque(asks), [], []
        order.rotate(number)
        for addition in tqdm(additions, desc=f"round {number + 1}", unit="prompt", leave=False):
            prompt = torch.cat([text, addition])
            lengths.append(len(prompt))
            calls.append({variant: asks[variant](prompt) for variant in order})
            order.rotate()
            if scenario == "chat":
                # The talk is the same for all.
                text = torch.cat([prompt, torch.tensor(calls[-1]["anew"].answer)])
        return lengths, calls

    def _warm_up(self, server: LlamaServer | None) -> None:
        """One short prompt to each."""
        prompt = self._prompts.texts("document")[0][:_WARM_UP]
        with TemporaryDirectory(prefix="hf-kvret-") as folder:
            for ask in self._asks(Path(folder), server).values():
                ask(prompt)

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each scenario, variant, and first call or later ones."""
        columns: tuple[timed.Column, ...] = (
            ("scenario", lambda cell, row: cell["scenario"]),
            ("calls", lambda cell, row: cell["call"]),
            ("variant", lambda cell, row: cell["variant"]),
            ("prompt tokens", lambda cell, row: f"{row['prompt_tokens']:,.0f}"),
            ("tokens read", lambda cell, row: f"{row['tokens_read']:,.0f}"),
            ("first token, s", lambda cell, row: f"{row['seconds']:.3f}"),
            ("quartiles", lambda cell, row: timed.spread(row, lambda x: f"{x:.3f}")),
            ("call, s", lambda cell, row: f"{row['seconds_call']:.3f}"),
            ("MB on disk", lambda _, row: f"{row['bytes'] / 1e6:.1f}" if "bytes" in row else "-"),
            ("same answers", _same),
        )
        setup = results.setup
        said = (
            f"{setup['model']} in {setup['dtype']}, {setup['method']}: a chat of {setup['turns']} "
            f"messages, {setup['questions']} questions to a document of {setup['context']:,} "
            f"tokens; medians of {setup['repeats']} rounds. Answers are compared with those of "
            "the variant anew."
        )
        table = timed.rows_table(columns, results, 3, said)
        builds = dict.fromkeys(row["build"] for _, row in results if "build" in row)
        return "\n".join([table, *(f"\n- {LLAMA_CPP}: build {build}" for build in builds)])

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Seconds to the first token, call by call."""
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for cell, row in results:
            if seconds := row.get("seconds_by_call"):
                xs, ys = lines.setdefault(f"{cell['scenario']}, {cell['variant']}", ([], []))
                first = 1.0 if cell["call"] == "first" else 2.0
                xs += [first + number for number in range(len(seconds))]
                ys += seconds
        title, y = "prompts that begin like earlier ones", "seconds to the first token"
        plot_lines(path, lines, title=title, x="call", y=y, log_y=True, whole_x=True)


def _row(cell: Cell, rounds: Sequence[Round], lengths: Sequence[int]) -> Row:
    """The numbers of a variant's first calls, or of its later ones."""
    span = slice(0, 1) if cell["call"] == "first" else slice(1, None)
    groups = [prompts[span] for prompts in rounds]
    calls = [one[cell["variant"]] for group in groups for one in group]
    row = timed.calls_row([call.first for call in calls]) | {
        "seconds_call": median(call.seconds for call in calls),
        "seconds_by_call": [
            median(one[cell["variant"]].first for one in same) for same in zip(*groups, strict=True)
        ],
        "prompt_tokens": median(lengths[span]),
        "tokens_read": median(call.read for call in calls),
    }
    if calls[0].answer is None:
        return row
    pairs = [(one[cell["variant"]].answer, one["anew"].answer) for group in groups for one in group]
    return row | {"same_answers": sum(own == other for own, other in pairs)}


def _same(cell: Cell, row: Row) -> str:
    return f"{row['same_answers']} of {row['timed']}" if "same_answers" in row else "-"


MEASUREMENT = Documents

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
