"""In bf16 and under ``torch.autocast``: as close to fp32 as the model's own cache, or refused."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret import FlatKVCache, LatentKVCache, ParisKVCache, RetrievalCache, attach
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, MODELS
from hf_kvret.testing.scenario import prompt

# A prompt, single tokens, drafted tokens, and a question that is attended exactly.
PASSES = (60, 1, 1, 1, 4, 1, 52)
Make = Callable[[PreTrainedConfig], RetrievalCache]
flat, paris = (partial(cls, **COVERING_OPTIONS) for cls in (FlatKVCache, ParisKVCache))
on_host = partial(flat, store="host")
BF16, FP32 = torch.bfloat16, torch.float32


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Cache, autocast: bool) -> torch.Tensor:
    """``[sum(PASSES), V]`` fp32."""
    chunks = prompt(1, sum(PASSES)).split(PASSES, dim=1)
    with torch.autocast("cpu", BF16, enabled=autocast):
        outputs = [model(chunk, past_key_values=cache).logits[0] for chunk in chunks]
    return torch.cat(outputs).float()


@pytest.mark.parametrize(
    ("name", "dtype", "make", "autocast"),
    [
        *(("llama", BF16, on_host, False), ("gemma2", BF16, paris, False)),
        *(("gpt_oss", BF16, flat, False), ("llama", BF16, flat, True)),
        # Of latents, what autocast makes is put together.
        ("deepseek_v3", FP32, flat, True),
        ("deepseek_v3", BF16, LatentKVCache, True),
    ],
)
def test_the_error_is_no_larger_than_the_models_own(
    name: str, dtype: torch.dtype, make: Make, autocast: bool
) -> None:
    model = {**MODELS, **LATENT_MODELS}[name].build()
    exact = logits(model, DynamicCache(config=model.config), autocast=False)
    converted = copy.deepcopy(model).to(dtype)
    stock = logits(converted, DynamicCache(config=model.config), autocast)
    attach(converted)
    cache = make(converted.config)
    ours = logits(converted, cache, autocast)
    stock_error, our_error = (stock - exact).abs(), (ours - exact).abs()
    assert stock_error.max() > 0.01
    # One run's rounding is chance: a quarter more on the mean, a half more on the worst token.
    assert our_error.mean() <= 1.25 * stock_error.mean()
    assert our_error.amax(-1).max() <= 1.5 * stock_error.amax(-1).max()
    assert make is LatentKVCache or all(layer["selected"] for layer in cache.stats()["layers"])


def test_keys_and_values_of_two_dtypes_are_refused_at_once() -> None:
    model = MODELS["llama"].build()
    attach(model)
    expected = logits(model, flat(model.config), autocast=False)
    cache = flat(model.config)
    message = r"keys are torch.float32, values are torch.bfloat16: .*autocast.*model\.to\(torch\.bf"
    with pytest.raises(ValueError, match=message):
        logits(model, cache, autocast=True)
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, cache, autocast=False), expected)
