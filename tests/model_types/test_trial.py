"""A trial tells a type that is served from one that is not."""

import pytest
import transformers
from transformers import AutoConfig

from hf_kvret import FlatKVCache
from hf_kvret.commands.models import default_type
from hf_kvret.models.compatibility import layer_shapes, model_layers

from . import trial
from .page import read_trials
from .small import VOCAB_SIZE, small_config


@pytest.fixture
def flat_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "registered_methods", lambda: {"flat": FlatKVCache})


def test_a_served_type_is_equal_and_its_rows_are_those_of_the_default(flat_only: None) -> None:
    assert trial.trial("gpt_bigcode") == trial.Trial("equal", rows=[[1, 64, 64]])
    default = default_type("gpt_bigcode")
    assert (default.kv_heads, default.key_dim) == (1, 64)


def test_a_lost_row_is_seen(flat_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {**trial.COVERING_OPTIONS, "top_k": 150, "rest": None}
    monkeypatch.setattr(trial, "COVERING_OPTIONS", few)
    result = trial.trial("gpt2")
    assert result.outcome == "differs" and "logits differ" in result.detail
    assert result.failures["flat"].startswith("logits differ")


def test_our_error_is_not_transformers(flat_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(FlatKVCache, "make_index", broken)
    result = trial.trial("gpt2")
    assert result.outcome == "raised" and "a planted fault" in result.detail


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_a_small_configuration_keeps_kinds_of_layers_and_shapes_of_heads(name: str) -> None:
    config = AutoConfig.for_model(name)
    small = small_config(config)
    assert set(map(type, model_layers(small))) == set(map(type, model_layers(config)))
    text, few = config.get_text_config(), small.get_text_config()
    assert few.head_dim == text.head_dim and few.num_hidden_layers <= 8
    assert layer_shapes(small)[-1].kv_heads <= 2 and few.vocab_size == VOCAB_SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", list(read_trials()[1]))
def test_the_trials_on_the_page_come_out_again(name: str) -> None:
    release, trials = read_trials()
    if release != transformers.__version__:
        pytest.skip(f"it was made with transformers {release}")
    assert trial.trial(name) == trials[name]
