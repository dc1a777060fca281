"""``hf-kvret bench documents``: a shelf saves tokens and changes no answer; beside it llama.cpp, by
a program in the place of ``llama-server`` that saves, restores and refuses as that one does.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_documents
import llama_server
import pytest
from bench_documents import Documents
from llama_bench import LLAMA_CPP

from hf_kvret.lab.evaluate.measurement import CheckFailed
from hf_kvret.lab.report.results import Results

Bench = Callable[..., int]
SMALL = Documents.smallest.split()

FAKE = r"""
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
assert given["--host"] == "127.0.0.1" and given["-np"] == "1" and Path(given["-m"]).is_file()
assert os.environ["LLAMA_ARG_CACHE_RAM"] == "0"
folder, slot = Path(given["--slot-save-path"]), []


class Server(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def say(self, content, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content.encode())

    def do_GET(self):
        self.say(json.dumps({"status": "ok", "build_info": "b1234-abc"}))

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "completion" in self.path:
            prompt = content["prompt"]
            if len(prompt) + content["n_predict"] > int(given["-c"]):
                return self.say('{"error": {"message": "exceeds the context"}}', 400)
            common = 0
            while common < min(len(slot), len(prompt) - 1) and slot[common] == prompt[common]:
                common += 1
            slot[:] = prompt
            end = {"stop": True, "timings": {"prompt_n": len(prompt) - common}}
            return self.say(f'data: {{"content": "w5 "}}\n\ndata: {json.dumps(end)}\n\n')
        path, action = folder / content["filename"], self.path.partition("action=")[2]
        if action == "save":
            path.write_text(json.dumps(slot))
        elif action == "restore":
            slot[:] = json.loads(path.read_text())
        else:
            slot.clear()
        self.say(json.dumps({"id_slot": 0}))


HTTPServer(("127.0.0.1", int(given["--port"])), Server).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a program of the given Python source, which the environment names from then on."""

    def make(source: str) -> Path:
        path = tmp_path / "server"
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("LLAMA_SERVER", str(path))
        return path

    return make


@pytest.fixture
def no_gguf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models for llama.cpp are empty files, and nobody looks for the package."""
    monkeypatch.setattr(bench_documents, "write_gguf", lambda path, *_, **__: path.touch())
    monkeypatch.setattr(bench_documents, "find_gguf", lambda: None)


def test_a_shelf_saves_tokens_and_changes_no_answer(
    bench: Bench, program: Callable[[str], Path], no_gguf: None, tmp_path: Path
) -> None:
    program(FAKE)
    path, picture = tmp_path / "documents.json", tmp_path / "documents.png"
    outputs = ["--json", str(path), "--plot", str(picture)]
    assert bench("documents", *SMALL, "--llama-cpp", "llama-server", *outputs) == 0
    results = Results.load(path)
    rows: dict[Any, Any] = {
        (cell["scenario"], cell["call"], cell["variant"]): row for cell, row in results
    }
    assert len(rows) == 2 * 2 * 4
    # The chat's second turn adds an answer of two tokens and a message.
    lengths = {"chat": (160, 322), "document": (370, 370)}
    for (scenario, call, variant), row in rows.items():
        first, later = lengths[scenario]
        assert row["timed"] == 1 and 0 < row["seconds"] <= row["seconds_call"]
        assert row["prompt_tokens"] == (first if call == "first" else later)
        is_kept = variant in ("shelf", LLAMA_CPP)
        assert ("bytes" in row) == is_kept
        if call == "first" or not is_kept:
            assert row["tokens_read"] == row["prompt_tokens"], (scenario, variant)
        if variant != LLAMA_CPP:
            assert row["same_answers"] == 1, (scenario, call, variant)
    assert rows["chat", "later", "shelf"]["tokens_read"] == 322 - 160
    # Questions have 70 tokens, and perhaps the first in common. A shelf gives whole blocks of 64.
    assert rows["document", "later", "shelf"]["tokens_read"] == 370 - 256
    assert rows["chat", "later", LLAMA_CPP]["tokens_read"] == 322 - 160
    assert 68 <= rows["document", "later", LLAMA_CPP]["tokens_read"] <= 70
    table = Documents.table(results)
    assert table.count("1 of 1") == 12 and "llama.cpp: build b1234-abc" in table
    assert picture.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "full"], "only caches of hf-kvret go on a shelf"),
        (["--method", "nothing"], "unknown cache 'nothing'"),
        (["--turns", "1"], "--turns 1: a shelf serves the second one"),
        (["--shelf-step", "1000"], "a first prompt has 160 tokens"),
        (["--question", "5"], r"--question 5: its needles and its question take \d\d tokens"),
        (["--llama-cpp", "nowhere"], "neither a file nor on PATH.*docs/benchmark.md"),
    ],
)
def test_mistakes_are_named(bench: Bench, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench("documents", *SMALL, *arguments)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit('a line\\nno such model')", "ended with status 1: no such model"),
        (FAKE.replace('"prompt_n"', '"other"'), "answered without timings"),
        (FAKE.replace("data: {{", "data: <{{"), "in the place of JSON"),
        (FAKE.replace('> int(given["-c"])', "> 1"), r"refused /completion \(400\).*exceeds"),
    ],
)
def test_a_server_that_fails_is_told_with_its_reason(
    source: str, message: str, program: Callable[[str], Path], tmp_path: Path
) -> None:
    server, model = program(source), tmp_path / "model.gguf"
    model.touch()
    with (
        pytest.raises(CheckFailed, match=message),
        llama_server.llama_server(server, model, tmp_path, 64) as client,
    ):
        client.ask([1, 2, 3], 2, 2)
