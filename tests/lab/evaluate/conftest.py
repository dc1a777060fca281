"""Models that several files of tests only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_kvret.lab.evaluate.subject import Subject, load_subject


@pytest.fixture(scope="session")
def subject(tiny_model_dir: Path) -> Subject:
    """The tiny model with its tokenizer."""
    return load_subject(str(tiny_model_dir))


@pytest.fixture(scope="session")
def needle() -> Subject:
    """The bundled needle model, which has no tokenizer."""
    return load_subject("needle")
