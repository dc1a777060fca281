"""A trial tells a type that is served from one that is not, and keeps what it found."""

from __future__ import annotations

import pytest
import transformers
from transformers import AutoConfig

from hf_kvret import FlatKVCache
from hf_kvret.lab.coverage import trial
from hf_kvret.lab.coverage.record import Record
from hf_kvret.lab.coverage.scan import default_type, kv_heads
from hf_kvret.lab.coverage.small import VOCAB_SIZE, small_config
from hf_kvret.models.compatibility import model_layers


@pytest.fixture
def flat_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "registered_methods", lambda: {"flat": FlatKVCache})


def test_a_served_type_is_equal_and_its_rows_are_those_of_the_default(flat_only: None) -> None:
    result = trial.trial("gpt_bigcode")
    assert result.outcome == "equal" and result.methods == {"flat": "equal"}
    assert result.rows == [[result.heads, 64, 64]] and result.heads == 1
    assert default_type("gpt_bigcode").key_dim == 64
    assert 0.0 < result.difference < 3e-4


def test_a_lost_row_is_seen(flat_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {**trial.COVERING_OPTIONS, "top_k": 150}
    monkeypatch.setattr(trial, "COVERING_OPTIONS", few)
    result = trial.trial("gpt2")
    assert result.outcome == "differs" and "logits differ" in result.detail
    assert result.methods["flat"].startswith("logits differ")


def test_an_error_of_ours_is_not_taken_for_one_of_transformers(
    flat_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(FlatKVCache, "make_index", broken)
    result = trial.trial("gpt2")
    assert result.outcome == "raised" and "a planted fault" in result.detail


def test_what_transformers_cannot_run_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise ImportError("needs a package")

    monkeypatch.setattr(trial, "small_model", broken)
    result = trial.trial("gpt2")
    assert result.outcome == "not tried"
    assert "needs a package" in result.detail and "there is none" in result.detail


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_a_small_configuration_keeps_kinds_of_layers_and_shapes_of_heads(name: str) -> None:
    config = AutoConfig.for_model(name)
    small = small_config(config)
    assert set(map(type, model_layers(small))) == set(map(type, model_layers(config)))
    text, few = config.get_text_config(), small.get_text_config()
    assert few.head_dim == text.head_dim and few.num_hidden_layers <= 8
    assert kv_heads(small) <= 2 and few.vocab_size == VOCAB_SIZE


@pytest.mark.slow
@pytest.mark.parametrize("name", list(Record.read().trials))
def test_the_trials_that_are_released_come_out_again(name: str) -> None:
    kept = Record.read()
    if kept.setups[name].transformers != transformers.__version__:
        pytest.skip(f"it was made with transformers {kept.setups[name].transformers}")
    again = trial.trial(name)
    assert (again.outcome, again.part, again.rows) == (
        kept.trials[name].outcome,
        kept.trials[name].part,
        kept.trials[name].rows,
    )
    assert again.methods == kept.trials[name].methods
