"""Classes of models without a source file: served by what they inherit, or told the real reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache
from hf_kvret.models.compatibility import has_source
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
ANSWER = "_can_set_attn_implementation_cached_value"

DECODER = """
from transformers import LlamaForCausalLM, LlamaModel
class Decoder(LlamaModel):
    pass
class Notebook(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
"""
ATTENTION = """
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention
class NotebookAttention(LlamaAttention):
    pass
class LoudAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
class AttentionOfTwo(LlamaAttention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.inner = NotebookAttention(config, layer_idx)
    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)
class Notebook(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = (LoudAttention, AttentionOfTwo)[number % 2](config, number)
"""
ALONE = """
from torch import nn
from transformers import LlamaForCausalLM
class OwnAttention(nn.Module):
    def forward(self, hidden_states, **kwargs):
        return hidden_states, None
class Notebook(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].self_attn = OwnAttention()
"""
FROM_NOTHING = """
from transformers import GenerationMixin, LlamaConfig, LlamaModel, PreTrainedModel
class Notebook(PreTrainedModel, GenerationMixin):
    config_class = LlamaConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
"""


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of which transformers knows no answer yet; later it would be inherited."""
    for kind in (*LlamaForCausalLM.__mro__, LlamaModel):
        if ANSWER in vars(kind):
            monkeypatch.delattr(kind, ANSWER)


@pytest.fixture(params=["notebook", "no module"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a cell of a notebook and gives back the class that it makes."""
    module = ModuleType("notebook_of_a_test")
    if request.param == "notebook":
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def run_cell(cell: str) -> type[PreTrainedModel]:
        exec(cell, vars(module))
        assert not has_source(module.Notebook)
        kind: type[PreTrainedModel] = module.Notebook
        return kind

    yield run_cell


@pytest.mark.parametrize(("cell", "base"), [(DECODER, "eager"), (ATTENTION, "sdpa")])
def test_a_class_without_a_source_is_served_by_its_ancestors_attention(
    cell: str, base: str, run: Any
) -> None:
    config = MODELS["llama"].config()
    torch.manual_seed(0)
    model = run(cell)(config).eval()
    model.set_attn_implementation(base)
    ids = prompt(2, 120)
    expected = model.generate(ids, **RUN)
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    assert torch.equal(model.generate(ids, past_key_values=cache, **RUN), expected)
    assert all(layer.selected for layer in cache.retrieval_layers)
    hf_kvret.restore(model)
    assert torch.equal(model.generate(ids, **RUN), expected)


def test_an_attention_that_never_calls_the_cache_is_an_error(run: Any) -> None:
    """A class without a source does not tell; its passes do."""
    model = run(ALONE)(MODELS["llama"].config()).eval()
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    with pytest.raises((ValueError, RuntimeError), match=r"added no token|different numbers of"):
        model.generate(prompt(1, 120), past_key_values=cache, **RUN)


def test_without_an_ancestor_the_message_says_where_the_class_belongs(run: Any) -> None:
    kind = run(FROM_NOTHING)
    with pytest.raises(ValueError, match=r"Notebook was made where there is no source file.*\.py"):
        hf_kvret.attach(kind(MODELS["llama"].config()))
