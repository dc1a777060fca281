"""The tutorial on a long text does what it says: commands and code in order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ..docs.pages import ROOT
from ..lab.calibrate.test_tutorial_calibration import read

PAGE = ROOT / "docs" / "tutorials" / "ask-a-long-text.md"


@pytest.mark.slow
def test_a_long_text_is_read_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = read(PAGE, SimpleNamespace(requests=[]))
    output, prompt = reader.names["output"], reader.names["prompt"]
    # The question, and what stands behind the last whole block of the document.
    document, new = reader.names["document"], reader.names["new"]
    assert 0 < new <= prompt.shape[1] - document.shape[1] + 64
    assert output.past_key_values.shelf_note.startswith("not put")
