"""Names and classes that differ by version of transformers, and warnings about versions."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from torch import nn
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret.models import versions
from hf_kvret.models.versions import CACHE_NAMES, cache_of
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

ROOT = Path(__file__).resolve().parents[2]
RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.mark.parametrize(("name", "other"), [CACHE_NAMES, CACHE_NAMES[::-1]])
@torch.no_grad()
def test_a_cache_may_have_either_name(name: str, other: str, llama: PreTrainedModel) -> None:
    """In ``generate``, in a loop and in a captured step; wrappers pass the other name as None."""
    ids = prompt(1, 40)
    hf_kvret.attach(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for more in ({}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {other: None}):
            cache = hf_kvret.FlatKVCache(llama.config, **COVERING_OPTIONS)
            llama.generate(ids, **RUN, **more, **{name: cache})
            assert cache.get_seq_length() >= 43
        theirs = transformers.DynamicCache(config=llama.config)
        llama.generate(ids, **RUN, **{name: theirs, other: None})
        assert theirs.get_seq_length() == 43
        cache = hf_kvret.FlatKVCache(llama.config, **COVERING_OPTIONS)
        step = hf_kvret.DecodeGraph(llama, cache)
        assert cache_of(llama(ids, **{name: cache, other: None})) is cache
        step(input_ids=ids[:, -1:], position_ids=torch.tensor([[40]]), **{name: cache})
    assert cache.get_seq_length() == 41


def test_a_cache_under_both_names_is_refused(llama: PreTrainedModel) -> None:
    caches = {name: hf_kvret.FlatKVCache(llama.config) for name in CACHE_NAMES}
    with pytest.raises(ValueError, match="two names of one argument"):
        llama.generate(prompt(1, 40), **RUN, **caches)


def test_a_forward_that_knows_one_name_gets_that() -> None:
    class Old(nn.Module):
        def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any: ...

    class New(nn.Module):
        def forward(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> Any: ...

    class Any_(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    assert versions.cache_name_of(Old) == "past_key_values"
    assert versions.cache_name_of(New) == "cache"
    assert versions.cache_name_of(Any_) == versions.CACHE_NAME
    assert versions.cache_name_of(type(MODELS["llama"].build())) == versions.CACHE_NAME


@pytest.mark.parametrize(
    ("package", "installed", "warns"),
    [
        *(("transformers", "5.17.0", True), ("transformers", "5.18.0", False)),
        ("transformers", "5.25.0.dev0", True),
        *(("torch", "2.11.0+cu130", False), ("torch", "3.0.0", True)),
    ],
)
def test_an_untested_version_is_warned_of_with_the_way_out(
    package: str, installed: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (oldest, _) in versions.TESTED.items():
        version = installed if name == package else f"{oldest}.0"
        monkeypatch.setattr(getattr(versions, name), "__version__", version)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        versions.warn_untested()
    messages = [str(record.message) for record in records]
    assert len(messages) == int(warns)
    if warns:
        assert f"this is {installed}" in messages[0]
        command = messages[0].split("pip install '")[1].split("'")[0]
        assert Requirement(command).specifier.contains(versions.TESTED[package][1] + ".0")


def test_the_range_is_that_of_the_package_and_holds_this_version() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest, newest = versions.TESTED["transformers"]
    following = f"5.{int(newest.split('.')[1]) + 1}"
    assert f'"transformers>={oldest},<{following}"' in text
    assert f'"torch>={versions.TESTED["torch"][0]}"' in text
    assert versions.RELEASE[:2] <= tuple(map(int, newest.split(".")))
