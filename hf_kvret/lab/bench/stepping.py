"""Decode steps: as usual, replayed from a CUDA graph, or in rounds with exact answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.opponents import CAPTURED, PreallocatedCache
from hf_kvret.lab.bench.timing import StepClock
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import feed
from hf_kvret.lossless.pace import GivenPace
from hf_kvret.lossless.steps import LosslessSteps
from hf_kvret.models.versions import as_argument
from hf_kvret.replay import DecodeGraph, compiled_layers

# Before a capture, which wants buffers of libraries to be there.
_WARM_STEPS = 3
# Each draft of a round is the first token, and its first step is given the second.
_DRAFT, _OTHER = 3, 4


class Steps:
    """Steps of one model and one filled cache, as usual: a forward pass each.

    The kind of a step is ``"flush"`` where tokens left the window, else ``"eager"``, ``"replay"``,
    ``"capture"`` (a graph was captured in it) or ``"round"`` (see ``LosslessRounds``).

    Args:
        model: with the attention that the cache needs.
        cache: filled with ``length`` tokens of each sequence.

    Attributes:
        reason: why a step is not replayed though it could be; None where nothing was to be.
    """

    reason: str | None = None

    def __init__(self, model: PreTrainedModel, cache: Cache, length: int) -> None:
        self.model, self.cache, self.length = model, cache, length

    def take(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Logits ``[B, 1, V]`` after ``tokens [B, 1]``, valid until the next step, and its kind."""
        cold_len = _cold_len(self.cache)
        logits, kind = self._forward(tokens)
        self.length += 1
        return logits, "flush" if _cold_len(self.cache) > cold_len else kind

    def run(self, token: torch.Tensor, count: int) -> tuple[torch.Tensor, list[float], list[str]]:
        """Take greedy steps from ``token [B, 1]``: the next one, seconds and kind of each step."""
        kinds, clock = [], StepClock(token.device)
        clock.mark()
        for _ in range(count):
            logits, kind = self.take(token)
            token = logits.argmax(-1)
            clock.mark()
            kinds.append(kind)
        return token, clock.seconds(), kinds

    def finish(self) -> None:
        """Let the cache hold the token of the newest step, where it does not yet."""

    def _forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        return feed(self.model, self.cache, tokens, self.length), "eager"

    def _logits(
        self, call: Callable[..., Any], tokens: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits of ``call``, which runs the model."""
        if positions is None:
            positions = torch.full((1, 1), self.length, device=tokens.device)
        return call(
            input_ids=tokens,
            attention_mask=None,
            position_ids=positions,
            **as_argument(self.cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits


class ReplayedSteps(Steps):
    """Steps of a retrieval cache through ``DecodeGraph``, which replays what it can."""

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, length: int) -> None:
        super().__init__(model, cache, length)
        self._graph = DecodeGraph(model, cache)

    def _forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        captures, replays = self._graph.captures, self._graph.replays
        logits = self._logits(self._graph, tokens)
        self.reason = self._graph.reason
        if self._graph.captures > captures:
            return logits, "capture"
        return logits, "replay" if self._graph.replays > replays else "eager"


class LosslessRounds(Steps):
    """Rounds of a cache with exact answers: drafts, the pass that verifies them, what is dropped.

    Each step of a run is a round, and its seconds are those of a token. All its drafts are right.

    Attributes:
        drafts: of a round, which gives one token more.
    """

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, length: int) -> None:
        super().__init__(model, cache, length)
        self.cache: RetrievalCache = cache
        self.drafts = cache.options.max_draft

    def run(self, token: torch.Tensor, count: int) -> tuple[torch.Tensor, list[float], list[str]]:
        """Take ``count`` rounds; see ``Steps.run``."""

        def guess(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full_like(logits.argmax(-1, keepdim=True), _DRAFT), logits

        graph = self.cache.options.graph == "auto"
        steps = LosslessSteps(
            self.model,
            self.cache,
            guess=guess,
            pace=GivenPace(self.drafts, None),
            step=DecodeGraph(self.model, self.cache) if graph else None,
        )
        clock, tokens = StepClock(token.device), 1 + self.drafts
        with steps:
            clock.mark()
            for _ in range(count):
                for index in range(tokens):
                    token = torch.full_like(token, _DRAFT if index else _OTHER)
                    self._logits(steps, token)
                    self.length += 1
                steps.close()
                clock.mark()
        return token, [one / tokens for one in clock.seconds()], ["round"] * count


class DenseGraphSteps(Steps):
    """Replays of one step of a preallocated cache, which is captured in the first.

    Each replay writes its token to the same slot and attends to the same number of tokens, so it
    costs what a step at this length costs, and the cache does not grow until ``finish``. An engine
    that moves on needs kernels which read the length on the device; they can only be slower.
    """

    cache: PreallocatedCache

    def __init__(self, model: PreTrainedModel, cache: PreallocatedCache, length: int) -> None:
        super().__init__(model, cache, length)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def take(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Logits ``[B, 1, V]`` after ``tokens [B, 1]``, always at the same length."""
        kind = "replay"
        if self._graph is None:
            self._graph, kind = self._capture(tokens), "capture"
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._last, kind

    def finish(self) -> None:
        self.length += 1
        self.cache.rewind(self.length)
        self._graph = None

    def _capture(self, tokens: torch.Tensor) -> torch.cuda.CUDAGraph:
        # The graph reads these tensors, so they have to stay where they are.
        self._tokens = tokens.clone()
        self._positions = torch.full((1, 1), self.length, device=tokens.device)
        current = torch.cuda.current_stream(tokens.device)
        stream = torch.cuda.Stream(tokens.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_STEPS):
                self._step()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._last = self._step()
        self.cache.rewind(self.length)
        return graph

    def _step(self) -> torch.Tensor:
        self.cache.rewind(self.length)
        return self._logits(self.model, self._tokens, self._positions)


class DenseCompiledSteps(DenseGraphSteps):
    """As ``DenseGraphSteps``, of a model that torch compiles as a whole, once for each length."""

    def __init__(self, model: PreTrainedModel, cache: PreallocatedCache, length: int) -> None:
        # A model that torch can't compile, or compiles too often, raises: it is no slower opponent.
        compiled: Any = torch.compile(
            model, backend=compiled_layers.BACKEND, fullgraph=True, dynamic=False
        )
        super().__init__(compiled, cache, length)


def make_steps(choice: CacheChoice, model: PreTrainedModel, cache: Cache, length: int) -> Steps:
    """The way in which ``choice`` takes its steps, behind ``length`` tokens."""
    if choice.name in CAPTURED:
        assert isinstance(cache, PreallocatedCache)
        kind = DenseCompiledSteps if choice.name == "dense-compiled" else DenseGraphSteps
        return kind(model, cache, length)
    if isinstance(cache, RetrievalCache) and cache.options.graph == "auto":
        return ReplayedSteps(model, cache, length)
    return Steps(model, cache, length)


def _cold_len(cache: Cache) -> int:
    """Tokens that have left the windows, summed over layers; 0 for other caches."""
    if not isinstance(cache, RetrievalCache):
        return 0
    kv = (layer.kv for layer in cache.retrieval_layers)
    return sum(one.cold_len for one in kv if one is not None)
