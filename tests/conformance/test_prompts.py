"""Prompts that retrieve: where a group chooses all blocks before it, what full attention gives."""

from itertools import cycle

import pytest

from hf_kvret import registered_methods
from hf_kvret.layer import prompt_groups
from hf_kvret.layer.prompt_groups import PromptPass
from hf_kvret.testing import MODES

from .cases import STORES, TELLING_MODES, check_case

RECIPE = {"above": 0, "floor": 0, "exact": 0, "probes": 3}
# A cap on logits, learned sinks, sliding layers, pictures, latents that heads share.
MODELS = ("llama", "gemma2", "gpt_oss", "gemma3", "qwen2_vl", "deepseek_v3")
METHODS = ("paris", "flat", "lrqk", "ctkvr", "h2o")
# A prompt is read in another way in each of them.
QUICK = (*TELLING_MODES, "inputs_embeds", "own_position_ids")
# A token at a time is no group.
_OTHERS = [mode for mode in MODES if mode not in (*QUICK, "prefill_by_token")]
# Models, methods and stores take turns.
CASES = [
    pytest.param(*case, marks=[] if case[0] in QUICK else [pytest.mark.slow])
    for case in zip((*QUICK, *_OTHERS), cycle(MODELS), cycle(METHODS), cycle(STORES))
]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts of blocks of 16 tokens that groups of 8 queries chose: all that there were."""
    counts = []

    def all_of_them(self: PromptPass, first: int, near: int) -> int:
        if near:
            counts.append(near // prompt_groups.BLOCK)
        # One more is the first block.
        return near // prompt_groups.BLOCK - 1 if near > prompt_groups.BLOCK else 0

    monkeypatch.setattr(prompt_groups, "GROUP", 8)
    monkeypatch.setattr(prompt_groups, "BLOCK", 16)
    monkeypatch.setattr(PromptPass, "_count", all_of_them)
    return counts


@pytest.mark.parametrize(("mode", "model", "method", "store"), CASES)
def test_all_blocks_are_full_attention(
    mode: str, model: str, method: str, store: str, chosen: list[int]
) -> None:
    may_skip = {"early_exit", "guidance"}
    check_case(registered_methods()[method], model, mode, store, {"prompt": RECIPE}, may_skip)
    assert min(chosen) > 0
