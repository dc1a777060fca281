"""One decode step as a CUDA graph: the dense opponent without launch costs."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_kvret.benchmark.opponents import PreallocatedCache

_WARM_STEPS = 3


class GraphStep:
    """A decode step at a fixed length, captured once and replayed.

    Each replay writes its token to the same slot and attends to the same number of tokens, so it
    costs what a step at this length costs, and the cache does not grow. An engine that moves on
    needs kernels which read the length on the device; they can only be slower.

    Args:
        model: with its own attention, on a CUDA device.
        cache: filled with ``length`` tokens; has room for one more.
        length: tokens held.
        tokens: ``[B, 1]`` the token to begin with.

    Attributes:
        logits: ``[B, 1, V]`` of the newest replay.
    """

    @torch.inference_mode()
    def __init__(
        self, model: PreTrainedModel, cache: PreallocatedCache, length: int, tokens: torch.Tensor
    ) -> None:
        self._model, self._cache, self._length = model, cache, length
        self._tokens = tokens.clone()
        self._positions = torch.full((1, 1), length, device=tokens.device)
        stream = torch.cuda.Stream(tokens.device)
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_STEPS):
                self._forward()
        torch.cuda.current_stream(tokens.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.logits = self._forward()
        cache.rewind(length)

    def replay(self, tokens: torch.Tensor) -> torch.Tensor:
        """The most likely tokens ``[B, 1]`` after ``tokens [B, 1]``."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self.logits.argmax(-1)

    def _forward(self) -> torch.Tensor:
        self._cache.rewind(self._length)
        return self._model(
            self._tokens,
            past_key_values=self._cache,
            position_ids=self._positions,
            use_cache=True,
            logits_to_keep=1,
        ).logits
