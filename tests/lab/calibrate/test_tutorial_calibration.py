"""The tutorial "calibrate, load, share" runs: commands and code in order, against the fake hub."""

from __future__ import annotations

import doctest
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.cli import main

from ...pages import blocks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorials" / "calibrate-share-load.md"
# Words of the blocks that ask no hub; all of them but the last come before the first that does.
OFFLINE = (
    "hf-kvret calibrate", "from-python", "--plot", "def ask", "LlamaForCausalLM(shape)", "tuned =",
    "HF_HUB_OFFLINE=1",
)  # fmt: skip
SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Reader:
    """Does what the page says, and keeps what was printed last."""

    def __init__(self, hub: Any, cache: Path) -> None:
        self.hub, self.cache, self.printed = hub, cache, ""
        self.names: dict[str, Any] = {"__name__": "page"}
        self._requests: dict[str, list[str]] = {}

    def asked(self, words: str) -> list[str]:
        """The requests of the first block with these words in it."""
        return next(asked for text, asked in self._requests.items() if words in text)

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
        """One line. What is set in front of a program is read when it starts, so that is done."""
        words = shlex.split(command)
        if words[0] == "hf-kvret":
            assert main(words[1:]) == 0, command
            return
        settings = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HUB_CACHE": str(self.cache),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        place = next(number for number, word in enumerate(words) if "=" not in word)
        assert words[place] == "hf-kvret", command
        settings |= dict(word.split("=", 1) for word in words[:place])
        program = [sys.executable, "-m", "hf_kvret.cli", *words[place + 1 :]]
        done = subprocess.run(program, env=os.environ | settings, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        print(done.stdout)


def test_the_tutorial_does_what_it_says(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    hub.users["hf_me"] = "me"
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    reader = Reader(hub, tmp_path / "hub-cache")
    for block in blocks(PAGE):
        if block.runs:
            reader.block(block.language, block.line, block.text)

    # The same model, text and options: the same codebooks by command and from Python.
    made = [
        file.read_bytes()
        for name in ("needle-a2ats", "from-python")
        for file in (here / name).glob("artifact-*.safetensors")
    ]
    assert len(made) == 2 and made[0] == made[1]
    assert (here / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert set(hub.repositories) == {"me/needle-a2ats", "me/needle-secret"}
    shared, secret = (hub.repositories[f"me/needle-{name}"] for name in ("a2ats", "secret"))
    assert set(shared.refs) == {"main", "v1"}
    assert secret.private and not shared.private
    # The hub is asked where the page says so, and only there.
    assert any("/resolve/" in request for request in reader.asked('revision="v1")\n    right'))
    assert any(request.startswith("POST") for request in reader.asked("private=True"))
    for words in OFFLINE:
        assert reader.asked(words) == []
    page = PAGE.read_text(encoding="utf-8")
    assert max(page.index(words) for words in OFFLINE[:-1]) < page.index("push_to_hub")
