"""The graphs that ``generate`` makes."""

from typing import Any

import pytest

from hf_kvret import DecodeGraph
from hf_kvret.generate import call


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraph]:
    """The graphs that ``generate`` decodes with, in order."""
    graphs: list[DecodeGraph] = []

    class Listed(DecodeGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            graphs.append(self)

    monkeypatch.setattr(call, "DecodeGraph", Listed)
    return graphs
