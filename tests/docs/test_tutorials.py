"""Tutorials run: commands and code in order, against the fake hub."""

import doctest
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from hf_kvret.cli import main
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.study import Corpus, calibrate
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.lab.evaluate.needles import needle_documents

from .pages import DOCS, blocks

PAGE = DOCS / "tutorials" / "calibrate-share-load.md"
# Words of the blocks that ask no hub; all of them but the last come before the first that does.
OFFLINE = ("hf-kvret calibrate", "def ask", "tuned =", "HF_HUB_OFFLINE=1")
pytestmark = pytest.mark.slow
SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Reader:
    """Does what the page says, and keeps what was printed last."""

    def __init__(self, hub: Any) -> None:
        self.hub, self.printed = hub, ""
        self.names: dict[str, Any] = {"__name__": "page"}
        self._requests: dict[str, list[str]] = {}

    def requests(self, words: str) -> list[str]:
        """The requests of the first block with these words in it."""
        return next(requests for text, requests in self._requests.items() if words in text)

    def block(self, language: str, line: int, text: str) -> None:
        before = len(self.hub.requests)
        if language == "text":
            same = doctest.OutputChecker().check_output(text, self.printed, SHOWN)
            assert same, f"line {line} promises\n{text}\nand printed is\n{self.printed}"
            return
        with redirect_stdout(StringIO()) as printed:
            if language == "bash":
                for command in text.replace("\\\n", " ").splitlines():
                    self.shell(command)
            else:
                assert language == "python", f"line {line}: nobody runs {language!r}"
                source = "\n" * (line - 1) + text
                exec(compile(source, str(PAGE), "exec", dont_inherit=True), self.names)
        self.printed = printed.getvalue()
        self._requests[text] = self.hub.requests[before:]

    def shell(self, command: str) -> None:
        """One line; a setting in front of the program holds while it runs."""
        words = shlex.split(command)
        settings, words = words[: (start := words.index("hf-kvret"))], words[start + 1 :]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (setting.split("=") for setting in settings):
                # The hub's client has read its settings, so that the environment comes too late.
                patch.setattr(constants, name, bool(int(value)))
            assert main(words) == 0, command


@pytest.fixture
def here(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; "me" is logged in."""
    hub.users["hf_me"] = "me"
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def read(page: Path, hub: Any) -> Reader:
    """Do what ``page`` says."""
    reader = Reader(hub)
    for block in blocks(page):
        if block.runs:
            reader.block(block.language, block.line, block.text)
    return reader


def test_the_tutorial_of_aqua_does_what_it_says(hub: Any, here: Path) -> None:
    reader = read(DOCS / "tutorials" / "two-bits.md", hub)
    # Nothing on this page asks a hub.
    assert not hub.repositories
    assert reader.requests("hf-kvret calibrate") == reader.requests("def ask") == []


def test_the_tutorial_does_what_it_says(hub: Any, here: Path) -> None:
    pytest.importorskip("matplotlib")
    reader = read(PAGE, hub)

    # The same model, text and options: the same codebooks by command and from Python.
    corpus = Corpus(list(needle_documents(2048, 1024, seed=0)), held_out=1, description={})
    options = A2ATSCalibration(codewords=64, rounds=10)
    calibrate(load_bundled_model(), corpus, options, here / "from-python", progress=False)
    made = [
        file.read_bytes()
        for name in ("needle-a2ats", "from-python")
        for file in (here / name).glob("artifact-*.safetensors")
    ]
    assert len(made) == 2 and made[0] == made[1]
    assert set(hub.repositories) == {"me/needle-a2ats", "me/needle-secret"}
    shared, secret = (hub.repositories[f"me/needle-{name}"] for name in ("a2ats", "secret"))
    assert set(shared.refs) == {"main", "v1"}
    assert secret.private and not shared.private
    # The hub is asked where the page says so, and only there.
    assert any("/resolve/" in request for request in reader.requests('artifact="me/'))
    assert any(request.startswith("POST") for request in reader.requests("private=True"))
    for words in OFFLINE:
        assert reader.requests(words) == []
    page = PAGE.read_text(encoding="utf-8")
    assert max(page.index(words) for words in OFFLINE[:-1]) < page.index("push_to_hub")


def test_a_long_text_is_read_once_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = read(DOCS / "tutorials" / "ask-a-long-text.md", SimpleNamespace(requests=[]))
    output, prompt = reader.names["output"], reader.names["prompt"]
    # The question, and what stands behind the last whole block of the document.
    document, new = reader.names["document"], reader.names["new"]
    assert 0 < new <= prompt.shape[1] - document.shape[1] + 64
    assert output.past_key_values.shelf_note.startswith("not put")
