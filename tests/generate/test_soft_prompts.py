"""Soft prompts of PEFT: served where their virtual tokens stand once, at the beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret.models.versions import CACHE_NAME, cache_of
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

peft = pytest.importorskip("peft", reason="soft prompts are PEFT's")
RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
KINDS = (peft.PromptTuningConfig, peft.PromptEncoderConfig, peft.PrefixTuningConfig)
TOKENS, VIRTUAL = 80, 8


def tuned(model: Any, kind: Any) -> Any:
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_soft_prompt_is_served_where_peft_puts_it_once(
    llama: Any, tmp_path: Path, kind: Any
) -> None:
    """Where this fails by what PEFT does with transformers' own cache, it does it right again."""
    ids = prompt(1, TOKENS)
    options = {**COVERING_OPTIONS, "shelf": str(tmp_path), "shelf_step": 64}
    call = {"cache_implementation": "paris", "cache_config": options}
    llama.generate(ids, **call, **RUN)
    model = tuned(llama, kind)
    plain = model.generate(input_ids=ids, **RUN)
    is_right = cache_of(plain).get_seq_length() == VIRTUAL + TOKENS + RUN["max_new_tokens"] - 1
    assert is_right == (CACHE_NAME == "past_key_values")
    if is_right and kind is not peft.PrefixTuningConfig:
        ours = model.generate(input_ids=ids, **call, **RUN)
        assert torch.equal(ours.sequences, plain.sequences)
        assert "virtual tokens" in cache_of(ours).shelf_note
        call = {"past_key_values": cache_of(ours)}
        ids = torch.cat([ours.sequences, prompt(1, 20)], 1)
    with pytest.raises(ValueError, match=f"PEFT {peft.__version__}"):
        model.generate(input_ids=ids, **call, **RUN)
    with model.disable_adapter():
        model.generate(input_ids=ids[:, :TOKENS], cache_implementation="paris", **RUN)
    # The base model goes on with what it has on the shelf.
    call = {"cache_implementation": "paris", "cache_config": options}
    assert cache_of(llama.generate(ids[:, :TOKENS], **call, **RUN)).from_shelf == TOKENS - 1
