"""One decode step as a CUDA graph: the dense opponent without launch costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, masking_utils

from hf_kvret.benchmark.opponents import PreallocatedCache

_WARM_STEPS = 3


@contextmanager
def unmasked() -> Iterator[None]:
    """A step without padding is captured without a mask, as it runs outside of a capture.

    In transformers 5.17 the mask's code takes a capture for an export, and builds a mask even
    where no padding is given. Then sdpa copies keys and values for every query head and leaves its
    fastest kernels. Where there is padding, nothing changes.
    """
    asked = masking_utils.is_tracing

    def of_padding(tensor: torch.Tensor | None = None) -> bool:
        return tensor is not None and asked(tensor)

    masking_utils.is_tracing = of_padding
    try:
        yield
    finally:
        masking_utils.is_tracing = asked


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
        with unmasked(), torch.cuda.stream(stream):
            for _ in range(_WARM_STEPS):
                self._forward()
        torch.cuda.current_stream(tokens.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with unmasked(), torch.cuda.graph(self._graph):
            self.logits = self._forward()
        cache.rewind(length)

    def replay(self, tokens: torch.Tensor) -> None:
        """Take the step with ``tokens [B, 1]``; ``logits`` then holds what comes after them."""
        self._tokens.copy_(tokens)
        self._graph.replay()

    def _forward(self) -> torch.Tensor:
        self._cache.rewind(self._length)
        return self._model(
            self._tokens,
            past_key_values=self._cache,
            position_ids=self._positions,
            use_cache=True,
            logits_to_keep=1,
        ).logits
