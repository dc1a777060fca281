"""Kernels are compiled in the first decode step for all steps to come, on a simulated GPU.

The sizes at which other kernels are taken are made small here.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import hf_kvret
from hf_kvret.replay import DecodeGraph

from ..simulated_gpu.device import simulated, to_device
from .cases import new_model

pytest.importorskip("triton")

STEPS = 9
OPTIONS: dict[str, Any] = {
    "top_k": 8, "sink": 2, "recent": 2, "flush": 6, "max_draft": 1, "dense_below": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch chooses 8 of up to 32 tokens, or of up to 64; windows have chunks of 4 tokens."""
    from hf_kvret_kernels.prompt_attention import triton as prompt
    from hf_kvret_kernels.top_k import triton as top_k

    sizes = (top_k._Blocks(16, 16, 256, 4), top_k._Blocks(32, 16, 256, 8))
    monkeypatch.setattr(top_k, "_SIZES", sizes)
    rule = prompt.rule

    def short(*sizes: int) -> prompt.PromptChoice:
        return replace(rule(*sizes), block_n=4, least_split_len=4)

    monkeypatch.setattr(prompt, "rule", short)


def compiled_later(prompt: int, mode: str = "eager", announced: bool = True) -> Counter[str]:
    """Kernels that are compiled after the first decode step, with how often.

    AssertionError: the window or what is chosen from did not outgrow a kernel, or one was compiled
    within a capture.
    """
    # One layer with a head, which selects for itself.
    model = new_model(num_hidden_layers=1, num_attention_heads=1)
    hf_kvret.attach(model)
    with simulated() as gpu, torch.inference_mode():
        to_device(model)
        captured = mode == "graph"
        cache = hf_kvret.FlatKVCache(model.config, **OPTIONS, graph="auto" if captured else False)
        call = DecodeGraph(model, cache) if captured else model
        tokens = torch.arange(prompt, device="cuda")[None] % 50 + 10
        mask = torch.ones_like(tokens)
        if mode == "padded":
            mask[:, :3] = 0
        if announced:
            cache.expect(prompt, prompt, STEPS)
        for number in range(STEPS + 1):
            gpu.phase = ("prompt", "first")[number] if number < 2 else "later"
            padding = {"attention_mask": mask} if mode == "padded" else {}
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = call(input_ids=tokens, position_ids=positions, past_key_values=cache, **padding)
            tokens = out.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        assert not captured or call.captures == 2
    assert {finding.kind for finding in gpu.findings} <= {"alignment"}
    assert cache.retrieval_layers[0].cold_len == prompt + 4
    return Counter(
        {name: count for (phase, name), count in gpu.compilations.items() if phase == "later"}
    )


# 30 cold tokens become 36, or 60 become 66.
@pytest.mark.parametrize(
    ("prompt", "mode"),
    [
        (32, "eager"),
        pytest.param(32, "padded", marks=pytest.mark.slow),
        pytest.param(62, "padded", marks=pytest.mark.slow),
        (62, "graph"),
        pytest.param(62, "eager", marks=pytest.mark.slow),
        pytest.param(32, "graph", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_compiled_after_the_first_step(prompt: int, mode: str) -> None:
    assert compiled_later(prompt, mode) == {}


@pytest.mark.slow
def test_without_an_announcement_twice_as_many_tokens_are_thought_of() -> None:
    assert compiled_later(32, announced=False) == {}
