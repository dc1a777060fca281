"""Which model types are served: every one that generates text, by its default configuration."""

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

import hf_kvret
from hf_kvret.commands.models import default_type, type_names

from .page import PAGE, markdown, read_trials, table_in

# No small model can be made of their default configurations; all but zamba have their own suites.
UNTRIED = {"gemma3n", "gemma3n_text", "zamba", "zamba2"}


# It imports the modules of all types.
@pytest.mark.slow
def test_every_type_is_served_as_its_trial_shows_or_refused_with_its_reason() -> None:
    """As the page says."""
    (release, trials), types = read_trials(), [*map(default_type, type_names())]
    assert len(types) > 150
    if release == transformers.__version__:
        served = {one.name for one in types if not one.refusal}
        assert served <= trials.keys()
        outcomes = {name: trials[name].outcome for name in served}
        assert {name for name in served if outcomes[name] == "not tried"} == UNTRIED
        assert {outcomes[name] for name in served - UNTRIED} == {"equal"}
        # ``python -m tests.model_types.page`` makes it anew.
        assert table_in(PAGE.read_text(encoding="utf-8")) == markdown(types, trials)


def test_a_refusal_names_the_type_and_the_way_out() -> None:
    types = {"diffusion_gemma", "inkling2", "qwen2_5_omni", "doge", "mllama", "rwkv", "bert"}
    for model_type in types.intersection(CONFIG_MAPPING.keys()):
        with pytest.raises(ValueError, match=model_type) as refusal:
            hf_kvret.ParisKVCache(AutoConfig.for_model(model_type))
        assert "cache_implementation" in str(refusal.value) or "is_decoder" in str(refusal.value)


class Bare(PreTrainedConfig):
    """A configuration that says nothing of layers or heads."""

    model_type = "bare"


def test_a_configuration_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="standard cache from a configuration of bare"):
        hf_kvret.FlatKVCache(Bare())
