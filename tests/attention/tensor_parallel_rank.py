"""One rank of ``test_tensor_parallel.py``: ``python tensor_parallel_rank.py MODEL_FOLDER OUT``.

Writes what each method generates, and the shapes of its weights, to ``OUT.RANK.pt``. Where the
environment says nothing of ranks, it is the only one.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import hf_kvret
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.models import projection
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

NEW_TOKENS = 8
TURN = 4
# One selection serves all heads of a latent, those of other ranks too: it has to cover everything.
OF_LATENTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "dynamic": ("dynamic", None),
    **{method: (method, COVERING_OPTIONS) for method in ("flat", "paris", "lrqk", "ctkvr", "h2o")},
    "latent": ("latent", None),
}
# Each KV head selects for itself.
SMALL = {"dense_below": 0, "sink": 4, "recent": 16, "flush": 16, "top_k": 8}
OF_HEADS: dict[str, tuple[str, dict[str, Any] | None]] = {
    f"{method}, rest={rest}": (method, {**SMALL, "rest": rest})
    for method in ("flat", "paris", "lrqk")
    for rest in (None, "mean", "index", "sample")
}


def tokens_of(model: Any, method: str, config: dict[str, Any] | None) -> torch.Tensor:
    """``[1, T]``: a prompt of 120 tokens, what was generated, and a second turn."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    if method != "dynamic":
        options["cache_implementation"] = method
        if config is not None:
            options["cache_config"] = config
    first = model.generate(prompt(1, 120), return_dict_in_generate=True, **options)
    asked = torch.cat([first.sequences, prompt(1, TURN)], dim=1)
    cache = first.past_key_values
    second: torch.Tensor = model.generate(
        asked, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    if method not in ("dynamic", "latent"):
        assert all(layer.selected for layer in cache.retrieval_layers), method
    return second


def main(folder: str, out: str) -> None:
    torch.set_num_threads(1)
    hf_kvret.register()
    parallel = {"tp_plan": "auto"} if "RANK" in os.environ else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **parallel).eval()
    module = model.model.layers[0].self_attn
    is_latent = hasattr(module, "kv_b_proj")
    variants = OF_LATENTS if is_latent else OF_HEADS
    found: dict[str, Any] = {name: tokens_of(model, *each) for name, each in variants.items()}
    if is_latent:
        weight = module.kv_b_proj.weight
        with torch.no_grad():
            heads = ModuleHeads(module)._matrices(torch.zeros(1))
        found["weight"] = type(weight).__name__, tuple(weight.shape), tuple(heads.shape)
        assert module.kv_b_proj not in projection._kept
    torch.save(found, f"{out}.{os.environ.get('RANK', 'one')}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
