"""llama.cpp's ``llama-server``: keys and values of a prompt are saved to a file, and restored."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import torch
from document_prompts import Call

from hf_kvret.lab.evaluate.measurement import CheckFailed

PROGRAM = "llama-server"
VARIABLE = "LLAMA_SERVER"
"""Of the environment: the program that ``llama-server`` stands for, where it is not on PATH."""
_FILE = "slot.bin"
_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 10.0
# An error shows so many characters of what a program said.
_MOST_SHOWN = 200
# It is on this machine, whatever proxies the environment names.
_OPENER = build_opener(ProxyHandler({}))


def find_server(name: str) -> Path:
    """The program of that path or name; ``LLAMA_SERVER`` is asked for ``llama-server`` first.

    Raises:
        ValueError: there is none, or it can't be run; names the remedy.
    """
    named = os.environ.get(VARIABLE) if name == PROGRAM else None
    result = shutil.which(Path(named or name).expanduser())
    if result is None:
        where = f"{VARIABLE} names {named}" if named else "it is neither a file nor on PATH"
        raise ValueError(
            f"--llama-cpp {name}: there is no such program ({where}): build {PROGRAM} as "
            f'docs/benchmark.md says ("llama.cpp"), and give its path, or set {VARIABLE} to it'
        )
    return Path(result).absolute()


class LlamaServer:
    """A running server with one slot, and the file that the slot is saved to.

    Attributes:
        build: as the server names it.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._file = url, folder / _FILE
        self.build = str(_json(self._open("/props").read()).get("build_info", "unknown"))

    @property
    def nbytes(self) -> int:
        """Of the file; 0 where nothing was saved."""
        return self._file.stat().st_size if self._file.exists() else 0

    def forget(self) -> None:
        """Nothing is known of any prompt afterwards."""
        self._file.unlink(missing_ok=True)
        self._slot("erase")

    def ask(self, prompt: Sequence[int], new_tokens: int, step: int) -> Call:
        """Restore what was saved, answer, and save where ``step`` tokens or more were read."""
        started, first, timings = time.perf_counter(), 0.0, None
        # Nothing but the file is known, as in a server that has just been started.
        self._slot("restore" if self._file.exists() else "erase")
        wanted = {"prompt": list(prompt), "n_predict": new_tokens, "id_slot": 0, "stream": True}
        wanted |= {"cache_prompt": True, "temperature": 0, "ignore_eos": True}
        with self._open("/completion", wanted) as lines:
            for line in lines:
                if line.startswith(b"data:"):
                    first = first or time.perf_counter() - started
                    timings = _json(line[5:]).get("timings", timings)
        try:
            read = int(timings["prompt_n"])  # type: ignore[index]
        except (KeyError, TypeError) as error:
            raise CheckFailed(f"{PROGRAM} answered without timings: {timings!r}") from error
        if read >= step:
            self._slot("save")
        return Call(first, time.perf_counter() - started, read, None)

    def _slot(self, action: str) -> None:
        self._open(f"/slots/0?action={action}", {"filename": _FILE}).read()

    def _open(self, path: str, content: Any = None) -> IO[bytes]:
        """The body of an answer; CheckFailed with what the server says where it refuses."""
        data = None if content is None else json.dumps(content).encode()
        request = Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            body: IO[bytes] = _OPENER.open(request)
        except HTTPError as error:
            why = error.read().decode(errors="replace")[:_MOST_SHOWN]
            raise CheckFailed(f"{PROGRAM} refused {path} ({error.code}): {why}") from error
        except OSError as error:
            raise CheckFailed(f"{PROGRAM} does not answer {path}: {error}") from error
        return body


@contextmanager
def llama_server(program: Path, model: Path, folder: Path, context: int) -> Iterator[LlamaServer]:
    """A server of ``model`` for ``context`` tokens; its slot is saved in ``folder``. It ends here.

    It runs on as many threads as torch, and listens on 127.0.0.1 alone.

    Raises:
        CheckFailed: it ends by itself, or does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-c", str(context), "-np", "1", "-t", str(torch.get_num_threads()), "-ngl", "0"]
    command += ["--slot-save-path", str(folder)]
    # Prompts that it would keep in memory are not what is measured; older builds don't know it.
    environment = {**os.environ, "LLAMA_ARG_CACHE_RAM": "0"}
    with TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _wait(process, f"http://127.0.0.1:{port}", output)
            yield LlamaServer(f"http://127.0.0.1:{port}", folder)
        finally:
            process.terminate()
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, output: IO[bytes]) -> None:
    """Come back when the server is ready."""
    deadline = time.perf_counter() + _SECONDS_TO_START
    while process.poll() is None and time.perf_counter() < deadline:
        try:
            with _OPENER.open(f"{url}/health"):
                return
        except (URLError, OSError):
            # It answers with 503 while it loads the model.
            time.sleep(0.05)
    output.seek(0)
    said = output.read().decode(errors="replace").strip().splitlines()[-1:] or ["without a word"]
    status = process.poll()
    end = "did not come up" if status is None else f"ended with status {status}"
    raise CheckFailed(f"{PROGRAM} {end}: {said[0][:_MOST_SHOWN]}")


def _json(text: bytes) -> dict[str, Any]:
    """What the server wrote; CheckFailed for something else."""
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        shown = text.decode(errors="replace")[:_MOST_SHOWN]
        raise CheckFailed(f"{PROGRAM} wrote {shown!r} in the place of JSON")
    return content
