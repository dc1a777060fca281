"""Decoding step by step on a very small model, to compare replayed steps with usual ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvret import DecodeGraph, registered_methods
from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.attach import attach
from hf_kvret.models.versions import as_argument
from hf_kvret.testing.tape import taped

PROMPT = 14
"""Tokens of the prompt of a ``DecodeLoop``."""

OPTIONS: dict[str, Any] = {
    "top_k": 4, "sink": 2, "recent": 6, "flush": 4, "max_draft": 4, "dense_below": 0,
}  # fmt: skip


def small_cache(model: Any, method: str = "flat", **options: Any) -> RetrievalCache:
    """An empty cache that soon has cold tokens."""
    options = {**OPTIONS, **options}
    return registered_methods()[method](model.config, **options)


def small_llama(layers: int = 2) -> Any:
    """Few layers and little else, attached: Triton's interpreter runs program by program."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    attach(model)
    return model


class Waiting(torch.nn.Module):
    """A norm that asks the device for a number, as experts without a fixed shape do."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.error: BaseException | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.error is not None and self.calls == 5:
            raise self.error
        if self.error is None and x.sum().item() != x.sum().item():
            raise AssertionError("not a number")
        result: torch.Tensor = self.norm(x)
        return result


class DecodeLoop:
    """Greedy decoding by hand, with the inputs that ``generate`` would pass.

    Args:
        call: the model, or a ``DecodeGraph`` of it.
        cache: an empty cache; the prompt is fed at once.
        padded: pad the second of the two sequences on the left.
        prompt: tokens of each sequence.

    Attributes:
        logits: ``[B, V]`` after the newest token.
        mask: ``[B, T]`` of all tokens, past and new; without padding it is not passed.
    """

    def __init__(
        self, call: Any, cache: RetrievalCache, padded: bool = False, prompt: int = PROMPT
    ) -> None:
        self.call, self.cache = call, cache
        self.tokens = torch.arange(2 * prompt).view(2, prompt) * 7 % 50 + 10
        self.mask = torch.ones_like(self.tokens)
        self.padded = padded
        if padded:
            self.mask[1, :5] = 0
        self.logits = self.feed(self.tokens)

    @torch.no_grad()
    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after ``tokens [B, n]``, which the mask has already."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = self.call(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self.mask if self.padded else None,
            **as_argument(self.cache),
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def step(self) -> torch.Tensor:
        """Feed the most likely token; the logits after it."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.logits = self.feed(self.logits.argmax(-1, keepdim=True))
        return self.logits

    def run(self, steps: int) -> torch.Tensor:
        """``[steps, B, V]``: the logits of as many steps."""
        return torch.stack([self.step() for _ in range(steps)])

    def copy(self, **changes: Any) -> DecodeLoop:
        """A loop that goes on from here, with other attributes."""
        twin = copy.copy(self)
        vars(twin).update(changes)
        return twin


def graphed(
    model: Any, method: str = "flat", padded: bool = False, prompt: int = PROMPT, **options: Any
) -> DecodeLoop:
    """A loop behind its prompt, whose ``call`` is a ``DecodeGraph``."""
    cache = small_cache(model, method, **options)
    return DecodeLoop(DecodeGraph(model, cache), cache, padded, prompt)


def compare(
    act: Callable[[DecodeLoop], torch.Tensor],
    method: str = "flat",
    padded: bool = False,
    prompt: int = PROMPT,
    model: Any = None,
    **options: Any,
) -> DecodeGraph:
    """The graph of a loop, where ``act(loop)`` gives with it what it gives with usual steps.

    Args:
        act: takes some steps.
        method: of the cache, whose other options are ``options``.
        padded: see ``DecodeLoop``.
        prompt: see ``DecodeLoop``.
        model: None for a ``small_llama`` of one layer.
    """
    model, results = model or small_llama(layers=1), []
    with taped():
        for graphed in (False, True):
            cache = small_cache(model, method, **options)
            call = DecodeGraph(model, cache) if graphed else model
            results.append(act(DecodeLoop(call, cache, padded, prompt)))
    assert torch.equal(*results)
    return call
