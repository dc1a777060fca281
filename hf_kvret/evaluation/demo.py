"""The main job in small: one long document, many questions, and what each cache costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.caches import CacheChoice, choose_caches
from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.evaluation.reader import Reader
from hf_kvret.registry import attach


@dataclass(frozen=True)
class DemoSetup:
    """What is asked. Lengths in tokens.

    Attributes:
        context: length of the document.
        questions: needles in the document, each asked once.
        top_k: budget of the retrieval caches, a count or a share.
        store: where their cold rows live.
        recall_questions: how many questions are asked again with recall measured.
        seed: of the document.
    """

    context: int = 16_384
    questions: int = 128
    top_k: int | float = 256
    store: str = "host"
    recall_questions: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise ValueError(f"questions={self.questions}: ask at least one")
        most, least = NeedleLanguage().most_needles, NeedleLanguage().least_length(self.questions)
        if self.questions > most:
            raise ValueError(
                f"--questions {self.questions}: the language has {most} keys; ask fewer"
            )
        if self.context < least:
            raise ValueError(
                f"--context {self.context}: {self.questions} needles take at least {least} tokens; "
                "give a longer one, or fewer --questions"
            )


@dataclass(frozen=True)
class DemoResult:
    """One row of the table.

    Attributes:
        cache: its name, options included; ``full`` is transformers' DynamicCache.
        right_ratio: share of questions answered with exactly the needle's value.
        prefill_seconds: the document's one forward pass.
        tokens_per_second: new tokens over the median time of a question, its reading included.
        device_bytes, host_bytes: what the filled cache holds, spare capacity included.
        full_bytes: keys and values of all tokens.
        read_ratio: share of the cold rows that decoding read; 1 for full attention.
        recall: share of the exact top-k that was selected, mean over layers; None for full.
        mass: share of the cold attention mass on the selected rows, mean over layers.
        recall_by_layer, mass_by_layer: the same for each retrieval layer, by its number.
    """

    cache: str
    right_ratio: float
    prefill_seconds: float
    tokens_per_second: float
    device_bytes: int
    host_bytes: int
    full_bytes: int
    read_ratio: float
    recall: float | None
    mass: float | None
    recall_by_layer: dict[int, float]
    mass_by_layer: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run_demo(model: PreTrainedModel, names: Sequence[str], setup: DemoSetup) -> list[DemoResult]:
    """Ask every cache in ``names`` the same questions about the same document.

    A name is one that ``choose_caches`` takes, options included, as ``lrqk:rank=16``.

    Raises:
        ValueError: an unknown cache name or option, or a context too short for the needles.
    """
    language, rng = NeedleLanguage(), np.random.default_rng(setup.seed)
    capacity = setup.context + language.question_len + language.value_len
    most = model.config.max_position_embeddings
    if capacity > most:
        raise ValueError(
            f"--context {setup.context}: with a question {capacity} tokens, and the model knows "
            f"{most} positions; give a shorter one"
        )
    options = {"top_k": setup.top_k, "store": setup.store}
    choices = choose_caches(list(names), options, str(model.device))
    for choice in choices.values():
        # A cache that can't be made is refused before the first document is read.
        choice.make(model.config, setup.context)
    keys, values = language.pairs(rng, setup.questions)
    document, _ = language.document(rng, setup.context, keys, values)
    prompts = torch.from_numpy(language.questions(keys))
    answers = torch.from_numpy(values)
    attach(model)
    with torch.inference_mode():
        # The first forward pass pays for start-up; no cache should.
        model(torch.from_numpy(document[:512])[None].to(model.device))
    tokens = torch.from_numpy(document)
    results = []
    for choice in choices.values():
        reader = Reader(model, choice, capacity)
        reader.prefill(tokens)
        results.append(_ask_all(reader, choice, prompts, answers, setup))
    return results


def _ask_all(
    reader: Reader,
    choice: CacheChoice,
    prompts: torch.Tensor,
    answers: torch.Tensor,
    setup: DemoSetup,
) -> DemoResult:
    right, seconds, read, cold = 0, [], 0, 0
    for prompt, answer in tqdm(
        list(zip(prompts, answers, strict=True)), desc=f"{choice.name}: questions", leave=False
    ):
        turn = reader.fork()
        right += turn.answer(prompt, len(answer)) == answer.tolist()
        seconds.append(turn.seconds)
        usage = turn.usage()
        read, cold = read + usage.rows_read, cold + usage.rows_cold
    held = reader.usage()
    recalls, masses = _recall(reader, prompts[: setup.recall_questions], answers.shape[1])
    return DemoResult(
        cache=choice.name,
        right_ratio=right / len(prompts),
        prefill_seconds=reader.seconds,
        tokens_per_second=answers.shape[1] / median(seconds),
        device_bytes=held.device_bytes,
        host_bytes=held.host_bytes,
        full_bytes=held.full_bytes,
        read_ratio=read / cold if cold else 0.0,
        recall=_mean(recalls),
        mass=_mean(masses),
        recall_by_layer=recalls,
        mass_by_layer=masses,
    )


def _recall(
    reader: Reader, prompts: torch.Tensor, count: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Recall and mass of each layer, mean over the questions; empty for other caches."""
    found: dict[int, list[dict[str, Any]]] = {}
    if isinstance(reader.cache, RetrievalCache):
        for prompt in tqdm(list(prompts), desc=f"{reader.choice.name}: recall", leave=False):
            turn = reader.fork(track_recall=True)
            turn.answer(prompt, count)
            for layer in turn.cache.stats()["layers"]:
                if "recall_overlap" in layer:
                    found.setdefault(layer["layer"], []).append(layer)
    recalls, masses = (
        {number: sum(one[key] for one in layers) / len(layers) for number, layers in found.items()}
        for key in ("recall_overlap", "recall_mass")
    )
    return recalls, masses


def _mean(by_layer: dict[int, float]) -> float | None:
    return sum(by_layer.values()) / len(by_layer) if by_layer else None
