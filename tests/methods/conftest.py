"""A small model that tests of methods share, and artifacts for it and others."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.testing import MODELS

from .aqua_caches import attached


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """The zoo's Llama with our attention; its weights are not to be changed."""
    return attached(MODELS["llama"].build())


@pytest.fixture(scope="session")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``(method, model of the zoo, **options) -> path`` of an artifact, made once."""

    @functools.cache
    def find(method: str, name: str, **options: Any) -> str:
        if method == "aqua":
            options = {"bits": 4, "space": "before", **options}
        folder = tmp_path_factory.mktemp(f"{method}-{name}")
        return tiny_artifact(MODELS[name].build(), method, folder, **options)

    return find
