"""A Chromium that is driven: opens pages, clicks, looks, and notes every address that is asked for.

It speaks the DevTools protocol over a pipe, so that nothing but Debian's ``chromium`` is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_S = 60.0


def chromium_binary() -> str | None:
    """Where Chromium is; None: not here."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def flags_of(profile: str) -> list[str]:
    """Flags for a headless run on a folder that is thrown away, without any name resolved."""
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    # Nothing may be fetched: every name is unknown.
    return [*flags, "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]


class Browser:
    """One page. See ``open_browser``.

    Attributes:
        errors: messages of its console, and exceptions nobody caught.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []

    def attach(self) -> None:
        """Make a page, and listen to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        made = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = made["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol; RuntimeError for one that is refused."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Look through a window of so many CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, address: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in JavaScript; RuntimeError where it throws."""
        made = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in made:
            raise RuntimeError(f"{script}: {made['exceptionDetails']}")
        return made["result"].get("value")

    def wait(self, condition: str, seconds: float = WAIT_S) -> None:
        """Until an expression is true; TimeoutError with what the page shows otherwise."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText")
                raise TimeoutError(f"never true: {condition}; errors {self.errors}; page:\n{text}")
            time.sleep(0.05)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        made = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError("Chromium does not answer")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:400])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"])[:400])


@contextmanager
def open_browser(*flags: str) -> Iterator[Browser]:
    """A browser with an empty page, ended at the end; ``flags`` are more of Chromium's."""
    binary = chromium_binary()
    assert binary, "there is no chromium here"
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [binary, *flags_of(profile), "--remote-debugging-pipe", *flags, "about:blank"]
        # Chromium reads commands from 3 and writes to 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            browser = Browser(ours_out, ours_in)
            browser.attach()
            yield browser
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
