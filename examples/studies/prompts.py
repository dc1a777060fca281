"""The loss of a prompt whose groups of queries attend to chosen blocks: behind it and inside it, by
what scores the blocks, their sizes and their number.

    python examples/studies/prompts.py --model smollm2 --text wiki.test.raw --context 7K
    python examples/studies/prompts.py --model needle --parts needles --context 8K,16K
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from ablation import (
    Ablation,
    caches_option,
    check_needles,
    curves_of,
    made,
    not_here,
    parts_option,
    values_option,
)
from distances import cache_of, distance, full_attention
from tqdm import tqdm

from hf_kvret.contracts.store import AttentionResult
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.needles import NeedleLanguage
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.common_options import context_option, count_option
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import Columns, table_of
from hf_kvret.layer import layer, prompt_groups
from hf_kvret.layer.exact_attention import attend_dense
from hf_kvret_kernels.block_lse import block_lse

# Tokens behind a prompt attend to everything.
_EXACT = {"above": 1 << 40}
_PAIRS = "pairs", "pairs of query and key, share"
# Questions of a document; they are spread over its second half.
_QUESTIONS = 24


@dataclass(frozen=True)
class Recipe:
    """A variant: the library's ``PromptRecipe`` and what the library has settled.

    Attributes:
        top_k, exact, probes: as there; nothing has a floor here.
        score: what a probe scores a block by: ``exact``, the sum of its keys' weights, or ``mean``,
            the product with their mean.
        block, group: tokens that are chosen together, and queries that share a choice.
        mass: where above 0, each KV head takes the fewest blocks with this share of the attention
            that its probes pay to earlier blocks, instead of ``top_k``.
    """

    top_k: int | float = 0.125
    exact: int = 512
    probes: int | str = 16
    score: str = "exact"
    block: int = 64
    group: int = 512
    mass: float = 0.0

    @classmethod
    def of(cls, text: str) -> Recipe:
        """A recipe from ``name=value``, several with colons; ArgumentTypeError for another text."""
        known = [one.name for one in fields(cls)]
        values: dict[str, Any] = {}
        for part in text.split(":"):
            name, _, value = part.partition("=")
            if name not in known or not value:
                raise argparse.ArgumentTypeError(
                    f"{text!r}: give name=value, of {', '.join(known)}"
                )
            values[name] = value if name == "score" or value == "all" else _number(value)
        return cls(**values)

    def option(self) -> dict[str, Any]:
        """The option ``prompt`` of a cache."""
        names = ("top_k", "exact", "probes")
        return {"above": 0, "floor": 0} | {name: getattr(self, name) for name in names}


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _recipe_text(text: str) -> str:
    Recipe.of(text)
    return text


def mean_scores(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, **options: Any
) -> torch.Tensor:
    """As ``block_lse``; blocks before all probes are scored by the means of their keys."""
    scores, block = block_lse(query, key, positions, **options), options["block"]
    heads, count = key.shape[1], int(positions.min()) // block
    means = key[:, :, : count * block].unflatten(2, (count, block)).mean(3)
    products = query.unflatten(1, (heads, -1)) @ means.unsqueeze(2).mT * options["scale"]
    scores[..., :count] = products.flatten(1, 2) + math.log(block)
    return scores


@dataclass(eq=False)
class StudiedPass(prompt_groups.PromptPass):
    """A pass of batch 1 that tells its share of pairs and, with ``mass``, chooses blocks by it.

    Attributes:
        mass: as in ``Recipe``.
        pairs: gets the share of all pairs of a query and a key before it that are attended to.
    """

    mass: float = 0.0
    pairs: list[float] = field(default_factory=list)

    def attend(self) -> torch.Tensor:
        self._skipped, self._counts = 0.0, [0]
        out = super().attend()
        count = self.query.shape[2]
        self.pairs.append(1.0 - self._skipped / (count * (self.past + (count + 1) / 2)))
        return out

    def _choose(
        self, first: int, last: int, near: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mass:
            blocks, lost = self._choose_by_mass(first, last, near)
        else:
            blocks, lost = super()._choose(first, last, near, count)
            self._counts = [blocks.shape[2]]
        attended = prompt_groups.BLOCK * fmean(self._counts)
        self._skipped += (near - attended) * (last - first)
        return blocks, lost

    def _choose_by_mass(
        self, first: int, last: int, near: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All blocks ``[1, Hkv, n]`` by relevance; ``_counts`` says how many a KV head takes."""
        shares = self._shares(*self._probes(first, last), near, last)
        relevance = shares.amax(2)
        relevance[..., 0] = float("inf")
        blocks = relevance.argsort(dim=2, descending=True)
        sums = shares.mean(2).gather(2, blocks).cumsum(2)
        counts = 1 + (sums < self.mass * sums[..., -1:]).sum(2, keepdim=True)
        counts.clamp_(max=blocks.shape[2])
        self._counts = counts.flatten().tolist()
        return blocks, (sums[..., -1:] - sums.gather(2, counts - 1)).mean()

    def _attend_blocks(self, query: torch.Tensor, blocks: torch.Tensor) -> list[AttentionResult]:
        if not self.mass:
            return super()._attend_blocks(query, blocks)
        parts = []
        for head, own in enumerate(query.chunk(blocks.shape[1], dim=1)):
            ids = blocks[:, head : head + 1, : self._counts[head]]
            rows = [rows[:, head : head + 1] for rows in (self.keys, self.values)]
            chosen = (prompt_groups._gather_blocks(one, ids) for one in rows)
            parts.append(attend_dense(own, *chosen, self.call.scoring))
        outs, sums = zip(*parts, strict=True)
        return [(torch.cat(outs, dim=1), torch.cat(sums, dim=1))]


@contextmanager
def reading_by(recipe: Recipe) -> Iterator[list[float]]:
    """Prompts are read as ``recipe`` says; yields what the passes of layers tell of their pairs."""
    pairs: list[float] = []
    studied = partial(StudiedPass, mass=recipe.mass, pairs=pairs)
    score = block_lse if recipe.score == "exact" else mean_scores
    changed = {"GROUP": recipe.group, "BLOCK": recipe.block, "block_lse": score}
    with patch.object(layer, "PromptPass", studied), patch.multiple(prompt_groups, **changed):
        yield pairs


def spread_questions(length: int, seed: int) -> torch.Tensor:
    """A document ``[length]`` of needles, then of questions with their answers between noise."""
    language, rng = NeedleLanguage(), np.random.default_rng(seed)
    keys, values = language.pairs(rng, 2 * _QUESTIONS)
    half, asked = length // 2, rng.permutation(len(keys))[:_QUESTIONS]
    document, _ = language.document(rng, length - half, keys, values)
    turns = np.concatenate([language.questions(keys[asked]), values[asked]], axis=1)
    stretches = language.noise(rng, half // _QUESTIONS * _QUESTIONS).reshape(_QUESTIONS, -1)
    starts = rng.integers(stretches.shape[1] - turns.shape[1], size=(_QUESTIONS, 1))
    np.put_along_axis(stretches, starts + np.arange(turns.shape[1]), turns, axis=1)
    rest = language.noise(rng, half - stretches.size)
    return torch.from_numpy(np.concatenate([document, stretches.reshape(-1), rest]))


def _surprise(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood of each token but the first, after the one before it."""
    return -float(logits[:-1].gather(1, tokens[1:, None]).mean())


def _comparison(
    place: str, logits: torch.Tensor, expected: torch.Tensor, tokens: torch.Tensor
) -> dict[str, float]:
    """``distance`` by place, and ``perplexity`` as a share of full attention's."""
    logits = logits.float().log_softmax(-1)
    ratio = math.exp(_surprise(logits, tokens) - _surprise(expected, tokens))
    row = distance([(logits, expected)]) | {"perplexity": ratio}
    return {f"{name} {place}": value for name, value in row.items()}


def _found_share(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Share of the questions in ``tokens [n]`` whose answers' tokens are each the best one."""
    language = NeedleLanguage()
    arrows = (tokens == language.arrow).nonzero()
    before = arrows + torch.arange(language.value_len)
    return float((logits[before].argmax(-1) == tokens[before + 1]).all(1).double().mean())


_FIRST: Columns = {
    "recipe": lambda cell, row: cell["variant"],
    "context": lambda cell, row: str(cell["length"]),
    "pairs": lambda cell, row: f"{row['pairs']:.3f}",
    "lost mass": lambda cell, row: f"{row['lost']:.3f}",
}


def _distances(place: str) -> Columns:
    return {
        f"KL {place} +- s.e.": lambda cell, row: (
            f"{row[f'kl {place}']:.4f} +- {row[f'kl_error {place}']:.4f}"
        ),
        f"equal {place}": lambda cell, row: f"{row[f'equal {place}']:.1%}",
        f"perplexity {place}": lambda cell, row: f"{row[f'perplexity {place}'] - 1:+.1%}",
    }


_TEXT = _FIRST | _distances("behind") | _distances("inside")
_NEEDLES = _FIRST | {
    "found inside": lambda cell, row: f"{row['found']:.1%}",
    "full attention finds": lambda cell, row: f"{row['full']:.1%}",
}


@dataclass(frozen=True, kw_only=True)
class Prompts(Ablation):
    """The loss of a prompt that is read by retrieval, behind it and inside it."""

    name = "prompts"
    method = "flat"
    example = "recent=128"
    chosen = ("prompt", "top_k")
    instead = ": --recipes names them"
    described = ("windows", "new_tokens")
    tables = MappingProxyType(
        {
            "text": partial(table_of, columns=_TEXT),
            "needles": partial(table_of, columns=_NEEDLES),
        }
    )
    plots = MappingProxyType(
        {
            "text": curves_of("what prompts lose inside", _PAIRS, ("kl inside", "KL, nats")),
            "needles": curves_of("questions inside prompts", _PAIRS, ("found", "found, share")),
        }
    )
    smallest = (
        "--model needle --context 2K --windows 1 --new-tokens 64 "
        "--recipes top_k=0.1:exact=128,mass=0.5,mass=0.99,top_k=1.0"
    )

    model: str = option("reference", "a folder, a hub id, or a model of ours")
    caches: str | None = caches_option("flat")
    context: tuple[int, ...] = context_option((7168,), "tokens of a prompt")
    new_tokens: int = count_option(512, "behind the prompt, which attend to everything")
    parts: tuple[str, ...] = parts_option(tables)
    step: int = not_here(1)
    recipes: tuple[str, ...] = values_option(
        ("top_k=1", "top_k=0.125", "top_k=0.25"),
        "name=value, several with colons: top_k, exact, probes, score, block, group, mass",
        _recipe_text,
    )

    def variants(self, part: str) -> Sequence[str]:
        return self.recipes

    def following(self, part: str) -> int:
        return self.new_tokens if part == "text" else 0

    def contexts(self, subject: Subject, part: str, length: int) -> list[torch.Tensor]:
        if part == "text":
            return super().contexts(subject, part, length)
        check_needles(subject)
        seeds = range(self.seed, self.seed + self.windows)
        return [spread_questions(length, seed) for seed in seeds]

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        recipe, length = Recipe.of(cell["variant"]), cell["length"]
        cache, options = cache_of(subject, choice)
        options = options.replace(top_k=1.0, prompt=recipe.option())
        read = made(cell["cache"], type(cache), options)
        contexts = self.contexts(subject, cell["part"], length)
        rows: list[dict[str, float]] = []
        for tokens in tqdm(contexts, leave=False, desc=cell["variant"]):
            reader = Reader(subject.model, read, len(tokens))
            with reading_by(recipe) as pairs:
                logits = reader.prefill(tokens[:length], keep=length - length // 2)
            # These are logits of the prompt's second half, then of the tokens behind it.
            expected = full_attention(subject.model, tokens, length // 2)
            expected, later = expected.split([len(logits), len(tokens) - length])
            own = tokens[length // 2 : length]
            lost = [one.get("prompt_lost_mass", 0.0) for one in reader.cache.stats()["layers"]]
            row = {"pairs": fmean(pairs), "lost": fmean(lost)}
            if cell["part"] == "needles":
                row |= {"found": _found_share(logits, own), "full": _found_share(expected, own)}
            else:
                new = tokens[length:]
                behind = reader.fork(prompt=_EXACT).feed(new, keep=len(new))
                row |= _comparison("inside", logits, expected, own)
                row |= _comparison("behind", behind, later, new)
            rows.append(row)
        return {name: fmean(row[name] for row in rows) for name in rows[0]}


MEASUREMENT = Prompts

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
