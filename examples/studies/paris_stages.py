"""Which stage of ParisKV loses tokens: its candidates, or the order of its estimates? Stage 1
alone is all candidates, stage 2 alone the best estimates of all keys.

    python examples/studies/paris_stages.py --model smollm2 --text wiki.test.raw --context 4K,7K
"""

import sys
from collections import defaultdict
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import Row, run_script
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.tasks.agreement import Agreement
from hf_kvret.lab.program.options import with_default
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.step import StepRecord, Subscriber
from hf_kvret.methods.paris import ParisIndex
from hf_kvret.observe.recall import exact_scores, measure_recall
from hf_kvret_kernels.relevance import group_relevance

COLUMNS = ("candidates", "recall of stage 1", "of stage 2 alone", "of both", "mass", "best mass")
NUMBERS = ("candidates", "first", "second", "overlap", "mass", "best_mass")


class StageMeter(Subscriber):
    """Measures the ``NUMBERS``, means over heads, by layer in ``steps``."""

    def __init__(self) -> None:
        self.steps: dict[int, list[tuple[float, ...]]] = defaultdict(list)

    def __call__(self, record: StepRecord) -> None:
        query, cold, index, ids = record.query, record.cold, record.kv.index, record.ids
        if not isinstance(index, ParisIndex) or ids is None:
            return
        keys = torch.cat([some for _, some in cold.store.key_chunks()], dim=2)
        scores = exact_scores(query, keys, cold.scale, cold.softcap)
        scores = scores.masked_fill(~cold.valid[:, None, None], float("-inf"))
        best = group_relevance(scores, ids.shape[1]).topk(cold.budget).indices

        def recall(budget: int, candidates: int) -> float:
            """Share of the exact top-k among ``budget`` tokens that a search finds."""
            other = copy(index)
            other.options = index.options.replace(per_selected=candidates / budget)
            chosen = other.search(query, replace(cold, budget=budget))
            return float((chosen[..., None] == best[..., None, :]).any(-2).float().mean())

        candidates = index.cost(len(cold), cold.budget).candidates
        stages = recall(candidates, candidates), recall(cold.budget, len(cold))
        both = measure_recall(query, ids, cold)[:3]
        self.steps[record.number].append((candidates / len(cold), *stages, *both))

    def reset(self) -> None:
        self.steps.clear()


@dataclass(frozen=True, kw_only=True)
class ParisStages(Agreement):
    """Recall of ParisKV's two stages on the last ``--new-tokens`` of texts, fed one by one."""

    name = "paris-stages"
    smallest = (
        f"--text {__file__} --context 400 --windows 1 --new-tokens 2 --top-k 9 "
        "--caches paris:dense_below=0:recent=16:flush=8"
    )

    caches: str = with_default(Agreement, "caches", "paris,paris:preset=paper:top_k=0.03")
    top_k: int | float = with_default(Agreement, "top_k", 0.03)

    def run(self, cell: Cell, choice: CacheChoice) -> Row:
        meter = StageMeter()
        for context in self.contexts(cell["length"]):
            reader = Reader(self.subject.model, choice, len(context))
            reader.prefill(context[: -self.new_tokens])
            for layer in reader.cache.layers:
                if isinstance(layer, RetrievalLayer):
                    layer.subscribers = (*layer.subscribers, meter)
            for token in context[-self.new_tokens :].split(1):
                reader.feed(token)
        if not meter.steps:
            raise ValueError(f"{choice.name} searched nothing: take paris, and a longer --context")
        means = {n: map(fmean, zip(*steps, strict=True)) for n, steps in meter.steps.items()}
        layers = [{"layer": n, **dict(zip(NUMBERS, x, strict=True))} for n, x in means.items()]
        return {"layers": layers}

    @classmethod
    def table(cls, results: Results) -> str:
        lines = [
            [cell["cache"], str(cell["length"])]
            + [f"{fmean(layer[name] for layer in row['layers']):.3f}" for name in NUMBERS]
            for cell, row in results
        ]
        return markdown_table(["cache", "context", *COLUMNS], lines)


MEASUREMENT = ParisStages

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
