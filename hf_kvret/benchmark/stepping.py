"""How a decode step is taken: as usual, replayed from a CUDA graph, or compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import CompileConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.benchmark.filling import feed
from hf_kvret.benchmark.graphs import GraphStep
from hf_kvret.benchmark.opponents import PreallocatedCache
from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.replay import DecodeGraph

# A compiled step is compiled in the first, and its graph is recorded in the next two.
LEAST_COMPILED_WARMUP = 3


@dataclass(frozen=True)
class Taken:
    """One step that was taken.

    Attributes:
        kind: ``"eager"``, ``"replay"``, ``"capture"`` (a graph was captured in it) or
            ``"compiled"``.
        flushed: tokens that left the windows in it, summed over layers.
    """

    kind: str
    flushed: int = 0

    @property
    def label(self) -> str:
        """``"flush"`` where tokens left the window, else the kind."""
        return "flush" if self.flushed else self.kind


class Steps:
    """Steps of one model and one filled cache, as usual: a forward pass each.

    Args:
        model: with the attention that the cache needs.
        cache: filled with ``length`` tokens of each sequence.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, length: int) -> None:
        self.model, self.cache, self.length = model, cache, length

    @property
    def reason(self) -> str | None:
        """Why a step is not replayed though it could be; None where nothing was to be replayed."""
        return None

    def take(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Taken]:
        """Logits ``[B, 1, V]`` after ``tokens [B, 1]``, valid until the next step, and its kind."""
        cold = cold_tokens(self.cache)
        logits, kind = self._forward(tokens)
        self.length += 1
        return logits, Taken(kind, max(0, cold_tokens(self.cache) - cold))

    def _forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        return feed(self.model, self.cache, tokens, self.length), "eager"


class ReplayedSteps(Steps):
    """Steps of a retrieval cache through ``DecodeGraph``, which replays what it can."""

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, length: int) -> None:
        super().__init__(model, cache, length)
        self._graph = DecodeGraph(model, cache)

    @property
    def reason(self) -> str | None:
        """What ``DecodeGraph`` says."""
        return self._graph.reason

    def _forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        graph = self._graph
        before = graph.captures, graph.replays
        positions = torch.arange(self.length, self.length + 1, device=tokens.device)
        logits = graph(
            input_ids=tokens,
            position_ids=positions[None],
            attention_mask=None,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        if graph.captures > before[0]:
            return logits, "capture"
        return logits, "replay" if graph.replays > before[1] else "eager"


class DenseGraphSteps(Steps):
    """Replays of one captured step of a preallocated cache, see ``GraphStep``.

    Each replay costs what a step at this length costs. The cache stays at ``length`` until
    ``finish``.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, length: int) -> None:
        super().__init__(model, cache, length)
        self._graph: GraphStep | None = None

    def take(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Taken]:
        """Logits ``[B, 1, V]`` after ``tokens [B, 1]``, always at the same length."""
        kind = "replay"
        if self._graph is None:
            assert isinstance(self.cache, PreallocatedCache)
            self._graph, kind = GraphStep(self.model, self.cache, self.length, tokens), "capture"
        self._graph.replay(tokens)
        return self._graph.logits, Taken(kind)

    def finish(self) -> None:
        """Let the cache hold the token of the newest step."""
        assert isinstance(self.cache, PreallocatedCache)
        self.length += 1
        self.cache.rewind(self.length)


class CompiledSteps(Steps):
    """Steps of transformers' static cache, compiled as ``generate`` compiles them.

    The compiler starts anew for each object: it guards on the buffers of one cache, and after
    some recompilations it would go on uncompiled without a word. Lengths are never made
    symbolic, which the opponent is better off with.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, length: int) -> None:
        super().__init__(model, cache, length)
        torch.compiler.reset()
        self._call = model.get_compiled_call(CompileConfig(dynamic=False))

    def _forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        positions = torch.arange(self.length, self.length + 1, device=tokens.device)
        torch.compiler.cudagraph_mark_step_begin()
        logits = self._call(
            tokens,
            past_key_values=self.cache,
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits, "compiled"


def make_steps(choice: CacheChoice, model: PreTrainedModel, cache: Cache, length: int) -> Steps:
    """The way in which ``choice`` takes its steps, behind ``length`` tokens."""
    if choice.name == "dense-graph":
        return DenseGraphSteps(model, cache, length)
    if choice.name == "static-compile":
        return CompiledSteps(model, cache, length)
    if isinstance(cache, RetrievalCache) and cache.options.graph == "auto":
        return ReplayedSteps(model, cache, length)
    return Steps(model, cache, length)


def cold_tokens(cache: Cache) -> int:
    """Tokens that have left the windows, summed over layers; 0 for other caches."""
    if not isinstance(cache, RetrievalCache):
        return 0
    regions = (layer.regions for layer in cache.retrieval_layers)
    return sum(one.cold_len for one in regions if one is not None)


def count_steps(taken: Sequence[Taken]) -> dict[str, int]:
    """How many steps there are of each label, the most frequent first."""
    return dict(Counter(step.label for step in taken).most_common())
