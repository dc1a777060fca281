"""The main job in small: one long document, many questions, and what each cache costs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.needles import NeedleLanguage
from hf_kvret.registry import attach, registered_methods


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


@dataclass(frozen=True)
class DemoResult:
    """One row of the table.

    Attributes:
        cache: its name; ``full`` is transformers' DynamicCache.
        right_ratio: share of questions answered with exactly the needle's value.
        prefill_seconds: the document's one forward pass.
        tokens_per_second: new tokens over the median time of a question, its reading included.
        device_bytes, host_bytes: what the filled cache holds, spare capacity included.
        full_bytes: keys and values of all tokens.
        read_ratio: share of the cold rows that decoding read; 1 for full attention.
        recall: share of the exact top-k that was selected, mean over layers; None for full.
        mass: share of the cold attention mass on the selected rows, mean over layers.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run_demo(model: PreTrainedModel, names: list[str], setup: DemoSetup) -> list[DemoResult]:
    """Ask every cache in ``names`` the same questions about the same document.

    Raises:
        ValueError: an unknown cache name, or a context too short for the needles.
    """
    if not names:
        raise ValueError(f"no cache named: choose among full, {', '.join(registered_methods())}")
    makers = {name: _cache_maker(name, model, setup) for name in names}
    language, rng = NeedleLanguage(), np.random.default_rng(setup.seed)
    keys, values = language.pairs(rng, setup.questions)
    document, _ = language.document(rng, setup.context, keys, values)
    prompts = torch.from_numpy(language.questions(keys)).to(model.device)
    answers = torch.from_numpy(values)
    attach(model)
    with torch.inference_mode():
        # The first forward pass pays for start-up; no cache should.
        model(torch.from_numpy(document[:512])[None].to(model.device))
    results = []
    for name, make in makers.items():
        started = time.perf_counter()
        cache = make()
        with tqdm(total=1, desc=f"{name}: prefill of {setup.context} tokens", leave=False) as bar:
            tokens = torch.from_numpy(document)[None].to(model.device)
            with torch.inference_mode():
                model(tokens, past_key_values=cache, logits_to_keep=1)
            bar.update()
        prefill = time.perf_counter() - started
        results.append(_ask_all(model, name, cache, prompts, answers, prefill, setup))
    return results


def _cache_maker(name: str, model: PreTrainedModel, setup: DemoSetup) -> Callable[[], Cache]:
    if name == "full":
        return lambda: DynamicCache(config=model.config)
    known = registered_methods()
    if name not in known:
        raise ValueError(f"unknown cache {name!r}: choose among full, {', '.join(known)}")
    options = known[name].config_class.from_options(top_k=setup.top_k, store=setup.store)
    # A cache that can't be made is refused before the first document is read.
    known[name](config=model.config, options=options)
    return lambda: known[name](config=model.config, options=options)


def _ask_all(
    model: PreTrainedModel,
    name: str,
    cache: Cache,
    prompts: torch.Tensor,
    answers: torch.Tensor,
    prefill: float,
    setup: DemoSetup,
) -> DemoResult:
    right, seconds, selected, cold = 0, [], 0, 0
    for prompt, answer in tqdm(
        list(zip(prompts, answers, strict=True)), desc=f"{name}: questions", leave=False
    ):
        turn = copy.deepcopy(cache)
        started = time.perf_counter()
        given = _answer(model, turn, prompt, len(answer))
        seconds.append(time.perf_counter() - started)
        right += bool(torch.equal(given, answer))
        if isinstance(turn, RetrievalCache):
            layers = turn.stats()["layers"]
            selected += sum(layer["selected"] + layer["exact_rows"] for layer in layers)
            cold += sum(layer["cold_rows"] for layer in layers)
    retrieves = isinstance(cache, RetrievalCache)
    recall, mass = _measure_recall(model, cache, prompts[: setup.recall_questions], answers)
    full = _full_bytes(cache)
    memory = cache.memory() if isinstance(cache, RetrievalCache) else None
    return DemoResult(
        cache=name,
        right_ratio=right / len(prompts),
        prefill_seconds=prefill,
        tokens_per_second=answers.shape[1] / median(seconds),
        device_bytes=memory.device if memory else full,
        host_bytes=memory.host if memory else 0,
        full_bytes=full,
        read_ratio=(selected / cold if cold else 0.0) if retrieves else 1.0,
        recall=recall,
        mass=mass,
    )


@torch.inference_mode()
def _answer(model: PreTrainedModel, cache: Cache, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """``[count]`` greedy tokens after ``prompt [n]``."""
    tokens, given = prompt[None], []
    for _ in range(count):
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1:].argmax(-1)
        given.append(int(tokens))
    return torch.tensor(given)


def _measure_recall(
    model: PreTrainedModel, cache: Cache, prompts: torch.Tensor, answers: torch.Tensor
) -> tuple[float | None, float | None]:
    if not isinstance(cache, RetrievalCache) or not len(prompts):
        return None, None
    overlaps, masses = [], []
    for prompt in tqdm(list(prompts), desc=f"{cache.name}: recall", leave=False):
        turn = cache.fork(track_recall=True)
        _answer(model, turn, prompt, answers.shape[1])
        for layer in turn.stats()["layers"]:
            if "recall_overlap" in layer:
                overlaps.append(layer["recall_overlap"])
                masses.append(layer["recall_mass"])
    if not overlaps:
        return None, None
    return sum(overlaps) / len(overlaps), sum(masses) / len(masses)


def _full_bytes(cache: Cache) -> int:
    if isinstance(cache, RetrievalCache):
        return cache.memory().full_attention
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
