"""Soft prompts of PEFT, which add virtual tokens, are refused with the way out."""

from typing import Any

import pytest
import torch

from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

peft = pytest.importorskip("peft", reason="soft prompts are PEFT's")
RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
KINDS = (peft.PromptTuningConfig, peft.PromptEncoderConfig, peft.PrefixTuningConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_a_soft_prompt_is_refused_until_it_is_turned_off(llama: Any, kind: Any) -> None:
    ids, call = prompt(1, 80), {"cache_implementation": "paris", "cache_config": COVERING_OPTIONS}
    expected = llama.generate(ids, **RUN)
    config = kind(task_type="CAUSAL_LM", num_virtual_tokens=8)
    model = peft.get_peft_model(llama, config).eval()
    with pytest.raises(ValueError, match=r"a soft prompt of PEFT .*LoRA, or turn this one off"):
        model.generate(input_ids=ids, **call, **RUN)
    with model.disable_adapter():
        assert torch.equal(model.generate(input_ids=ids, **call, **RUN), expected)
