"""Latent attention beside the cases of families: absorbed attention to all, and long rows."""

from itertools import cycle
from typing import Any

import pytest
import torch
import transformers

from hf_kvret import LatentKVCache, ParisKVCache, attach
from hf_kvret.testing import COVERING_OPTIONS, Case, run_case
from hf_kvret.testing.conformance import no_proof
from hf_kvret.testing.models import LONG_LATENT_MODEL

from .cases import TELLING_MODES, expect_passed


@pytest.mark.parametrize(
    ("model", "mode"),
    zip(cycle(("deepseek_v3", "glm4_moe_lite")), (*TELLING_MODES, "prefix_reuse")),
)
def test_absorbed_attention_to_all_is_the_same(model: str, mode: str) -> None:
    case = Case(model, mode)
    result = run_case(case, lambda built: LatentKVCache(config=built.config), proof=no_proof)
    expect_passed(result, ())


@pytest.fixture(scope="module")
def long_rows() -> transformers.PreTrainedModel:
    """One layer whose rows have 512 + 64 elements, as in DeepSeek-V3."""
    model = LONG_LATENT_MODEL.build()
    attach(model)
    return model


@pytest.mark.parametrize("store", ("device", "cpu"))
def test_paris_serves_rows_of_576_elements(store: str, long_rows: Any) -> None:
    """A selection of everything gives what full attention gives, padded rows included."""
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :11], mask[1, :11] = 0, 0
    run = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    run |= {"return_dict_in_generate": True, "output_logits": True}
    expected = long_rows.generate(ids, **run)
    cache = ParisKVCache(config=long_rows.config, store=store, **COVERING_OPTIONS)
    output = long_rows.generate(ids, past_key_values=cache, **run)
    assert torch.equal(output.sequences, expected.sequences)
    # fp32 sums of 576 terms in another order.
    torch.testing.assert_close(
        torch.stack(output.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4
    )
    (layer,) = cache.stats()["layers"]
    # All but sinks and padding.
    assert 0.6 * layer["cold_rows"] < layer["selected"] < layer["cold_rows"]


def test_paris_says_at_once_which_rows_it_has_no_codes_for() -> None:
    config = LONG_LATENT_MODEL.config()
    config.kv_lora_rank = 1024
    with pytest.raises(ValueError, match="use cache_implementation='flat'"):
        ParisKVCache(config=config)
    config.kv_lora_rank = 960
    ParisKVCache(config=config)
