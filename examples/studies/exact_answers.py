"""How many drafts full attention accepts in a round of ``lossless``, and whether texts are equal.

    python examples/studies/exact_answers.py --model smollm2 --text wiki.test.raw --context 4K \\
        --caches paris:top_k=0.03,lrqk:top_k=0.03 --drafts 8,16,32 --temperatures 0,0.8
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import run_script
from hf_kvret.lab.evaluate.task import Task
from hf_kvret.lab.evaluate.texts import text_windows
from hf_kvret.lab.program import options
from hf_kvret.lab.program.arguments import lengths, names
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import share, table_of


def temperatures(text: str) -> tuple[float, ...]:
    """Numbers of at least 0, separated by commas."""
    values = tuple(map(float, names(text)))
    if min(values) < 0:
        raise ValueError(f"{text}: temperatures are at least 0, which is greedy")
    return values


@dataclass(frozen=True, kw_only=True)
class ExactAnswers(Task):
    """Rounds of exact answers on any text: accepted drafts, and tokens equal to full attention's.

    ``generate`` goes on from each context, with full attention and with each cache, with the same
    seed where it samples.
    """

    name = "exact-answers"
    summary = "drafts that full attention accepts in a round"
    smallest = (
        f"--text {Path(__file__)} --context 256 --new-tokens 8 --drafts 4 --top-k 16 "
        "--caches paris:dense_below=0:recent=16:flush=8"
    )

    caches: str = options.with_default(Task, "caches", "flat,paris,lrqk,ctkvr")
    text: Path = options.text_option()
    context: tuple[int, ...] = options.context_option((4096,), "tokens of a context")
    windows: int = options.count_option(1, "at most this many contexts of each length")
    new_tokens: int = options.count_option(256, "of each answer")
    drafts: tuple[int, ...] = options.option((16,), "tokens of a round, as 8,16", kind=lengths)
    temperatures: tuple[float, ...] = options.option((0.0, 0.8), "0 is greedy", kind=temperatures)
    chat: bool = options.option(False, "the text is what a user says, in the model's chat template")

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        return [
            {"cache": name, "length": length, "temperature": temperature, "drafts": drafts}
            for length in self.context
            for name in caches
            for temperature in self.temperatures
            for drafts in self.drafts
        ]

    def check_length(self, length: int) -> None:
        self._contexts(length)
        super().check_length(length + self.new_tokens)

    def run(self, cell: Cell, choice: CacheChoice) -> dict[str, Any]:
        equal, counts = 0, {"rounds": 0, "drafted": 0, "accepted": 0}
        for number in range(len(self._contexts(cell["length"]))):
            filled, context = self._filled(choice, cell["length"], number)
            fork, drafts = filled.fork(), cell["drafts"]
            own = self._answer(context, cell["temperature"], fork, num_assistant_tokens=drafts)
            full = self._full(cell["length"], number, cell["temperature"])
            equal += int((own == full).sum())
            counts = {name: old + fork.stats()["lossless"][name] for name, old in counts.items()}
        contexts = len(self._contexts(cell["length"]))
        share_equal = equal / (contexts * self.new_tokens)
        accepted = counts["accepted"] / max(1, counts["rounds"])
        return counts | {"contexts": contexts, "equal": share_equal, "accepted_a_round": accepted}

    @once  # noqa: B019 - a study lives as long as its process
    def _filled(
        self, choice: CacheChoice, length: int, number: int
    ) -> tuple[RetrievalCache, torch.Tensor]:
        """A cache that holds all but the last token of a context, and the context ``[1, n]``."""
        context, model = self._contexts(length)[number], self.subject.model
        cache = choice.make(model.config, length + self.new_tokens)
        assert isinstance(cache, RetrievalCache), "full attention has no drafts"
        cache = cache.fork(lossless=True)
        with torch.inference_mode():
            model(context[:, :-1], past_key_values=cache, logits_to_keep=1)
        return cache, context

    @once  # noqa: B019 - see above
    def _full(self, length: int, number: int, temperature: float) -> torch.Tensor:
        return self._answer(self._contexts(length)[number], temperature, None)

    def _answer(
        self, context: torch.Tensor, temperature: float, cache: RetrievalCache | None, **more: Any
    ) -> torch.Tensor:
        """``[new_tokens]`` behind ``context [1, n]``; it does not end early."""
        torch.manual_seed(self.seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = self.subject.model.generate(
            context,
            attention_mask=torch.ones_like(context),
            past_key_values=cache,
            max_new_tokens=self.new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **(sampling if temperature else {"do_sample": False}),
            **more,
        )
        return output[0, context.shape[1] :]

    @once  # noqa: B019 - see above
    def _contexts(self, length: int) -> list[torch.Tensor]:
        windows = text_windows(self.subject, self.name, self.text, length, self.windows)
        if self.chat:
            tokenizer = self.subject.need_tokenizer(self.name)
            # Room for what the template adds.
            said = [tokenizer.decode(window[: length - length // 8]) for window in windows]
            chats = [[{"role": "user", "content": f"{one}\n\nSum this up."}] for one in said]
            windows = [
                tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )["input_ids"][0]
                for chat in chats
            ]
        return [window[None].to(self.subject.device) for window in windows]

    @classmethod
    def table(cls, results: Results) -> str:
        return table_of(
            results,
            {
                "cache": lambda cell, row: cell["cache"],
                "context": lambda cell, row: f"{cell['length']:,}",
                "temperature": lambda cell, row: f"{cell['temperature']:g}",
                "drafts": lambda cell, row: str(cell["drafts"]),
                "accepted a round": lambda cell, row: f"{row['accepted_a_round']:.1f}",
                "rounds": lambda cell, row: str(row["rounds"]),
                "tokens equal": lambda cell, row: share(row["equal"]),
            },
        )

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        groups = list(dict.fromkeys(cell["cache"] for cell, _ in results))
        bars: dict[str, list[float | None]] = {}
        for cell, row in results:
            kind = f"{cell['length']:,} tokens, {cell['drafts']} at {cell['temperature']:g}"
            heights = bars.setdefault(kind, [None] * len(groups))
            heights[groups.index(cell["cache"])] = row["accepted_a_round"]
        plot_groups(path, groups, bars, title="drafts accepted in a round", y="tokens")


MEASUREMENT = ExactAnswers

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
