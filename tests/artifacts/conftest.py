"""A small model and an artifact of it."""

from pathlib import Path

import pytest
import torch

from hf_kvret.artifacts import CalibrationArtifact, ModelIdentity
from hf_kvret.testing import MODELS


@pytest.fixture(scope="session")
def identity() -> ModelIdentity:
    """That of ``llama``, under the name of a hub repository."""
    return ModelIdentity.of(MODELS["llama"].build(), "meta/tiny-llama")


@pytest.fixture
def artifact(identity: ModelIdentity) -> CalibrationArtifact:
    """Two layers of codebooks in two dtypes."""
    codebooks = torch.randn(2, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    return CalibrationArtifact(
        method="a2ats",
        model=identity,
        tensors={
            **{f"layers.{n}.codebook": codebooks[n].bfloat16() for n in range(2)},
            **{f"layers.{n}.factor": codebooks[n, :, :2] for n in range(2)},
        },
        data={"datasets": ["alice/texts"], "tokens": 4096, "files": ["a.txt", "b.txt"]},
        options={"codewords": 8, "position": 2048, "seed": None},
        quality=[
            {"layer": 0, "score_error": 0.12345678, "plain_error": 0.25},
            {"layer": 1, "score_error": 0.0625, "note": "no RoPE"},
        ],
    )


@pytest.fixture
def saved(artifact: CalibrationArtifact, tmp_path: Path) -> Path:
    """A folder with a whole artifact."""
    artifact.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"
