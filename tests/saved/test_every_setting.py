"""One setting of a configuration changed: rows are refused, or the model makes the same ones."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig

from hf_kvret.models.versions import cache_name_of
from hf_kvret.saved.identity import around_text, facts_of, identity_of
from hf_kvret_model_patches.decoders import decoder_of

from ..model_types.page import read_trials
from ..model_types.small import build, image_inputs, small_model

_SOME = ("granite", "dbrx")
# These make other weights: of another shape, or tied to others.
_WEIGHTS = ("vocab_size", "tie_word_embeddings")
_IDS = torch.arange(128, 168)[None]


def scalars(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Path and value of every scalar of a configuration as it would be written, nested ones too."""
    if isinstance(part, PreTrainedConfig):
        items = [(name, vars(part)[name]) for name in part.to_dict() if name in vars(part)]
    else:
        items = [*(enumerate(part) if isinstance(part, list) else part.items())]
    for name, value in items:
        if isinstance(value, PreTrainedConfig | dict | list):
            yield from scalars(value, (*path, name))
        elif isinstance(value, bool | int | float | str):
            yield (*path, name), value


def change(config: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set the scalar at ``path`` to something else."""
    for name in path[:-1]:
        config = vars(config)[name] if isinstance(config, PreTrainedConfig) else config[name]
    value = not value if isinstance(value, bool) else value + ("x" if type(value) is str else 1)
    if isinstance(config, PreTrainedConfig):
        setattr(config, path[-1], value)
    else:
        config[path[-1]] = value


def told_by(config: PreTrainedConfig) -> dict[str, Any]:
    return facts_of(config) | around_text(config)


def rows(model: Any) -> list[torch.Tensor]:
    decoder, cache = decoder_of(model), DynamicCache(config=model.config)
    inputs = image_inputs(model.config.model_type, *_IDS.shape)
    with torch.no_grad():
        decoder(input_ids=_IDS, **inputs, **{cache_name_of(type(decoder)): cache})
    sides = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return [side for side in sides if side is not None]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _SOME else pytest.mark.slow)
        for name, trial in read_trials()[1].items()
        if trial.outcome == "equal"
    ],
)
def test_no_setting_lends_a_model_the_rows_of_another_one(name: str) -> None:
    try:
        model = small_model(name)
    except ImportError as error:
        pytest.skip(str(error))
    known, harmless = told_by(model.config), copy.deepcopy(model.config)
    for path, value in scalars(model.config):
        changed = copy.deepcopy(model.config)
        try:
            change(changed, path, value)
            is_seen = told_by(changed) != known
        except Exception:  # of any kind: no model is made of this
            continue
        if not is_seen and path[-1] not in _WEIGHTS:
            change(harmless, path, value)
    assert told_by(harmless) == known
    other = build(harmless, type(model))
    other.load_state_dict(model.state_dict())
    assert identity_of(model).difference(identity_of(other)) == ""
    for ours, theirs in zip(rows(other), rows(model), strict=True):
        assert torch.equal(ours, theirs)
