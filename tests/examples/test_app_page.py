"""The app's page in Chromium, asked and looked at; skipped without Chromium or Gradio."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


def driver() -> ModuleType:
    """docs/site/browser.py as a module."""
    spec = importlib.util.spec_from_file_location("browser", SITE / "browser.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = driver()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="the extra app is not installed"
    ),
    pytest.mark.skipif(browser.chromium_binary() is None, reason="there is no chromium here"),
]


class Server:
    """The app in a process of its own. ``log`` is what it printed.

    ``secret`` is a file that the environment tells Gradio to serve.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "secrets").mkdir()
        self.secret = folder / "secrets" / "secret.txt"
        self.secret.write_text("nobody's business")
        self._log = folder / "log"
        command = [sys.executable, str(ROOT / "examples" / "app.py")]
        environment = {
            **os.environ,
            "GRADIO_TEMP_DIR": str(folder / "uploads"),
            # Whoever set these would open the page to others.
            "GRADIO_SHARE": "True",
            "GRADIO_SERVER_NAME": "0.0.0.0",
            "GRADIO_ALLOWED_PATHS": str(self.secret.parent),
            "GRADIO_LOCAL_DEV_MODE": "1",
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, env=environment, cwd=folder
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def address(self) -> str:
        """Where it serves, once it does."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.log.splitlines():
                if line.startswith("open "):
                    return line.split()[1]
            time.sleep(0.1)
        raise AssertionError(f"the app does not serve: {self.log}")

    def status(self, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> int:
        """Of the answer to a request."""
        address = urlsplit(self.address())
        connection = HTTPConnection(str(address.hostname), address.port)
        connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        return connection.getresponse().status

    def stop(self) -> None:
        """And wait until it has ended."""
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--model", "needle", "--top-k", "8", "--max-upload", "20KB", "--new-tokens", "4")
    server = Server(tmp_path_factory.mktemp("app"), *options)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with browser.open_browser() as tab:
        yield tab


@pytest.fixture
def page(server: Server, tab: Any) -> Iterator[Any]:
    """The page, open; afterwards no other host was asked for anything, and nothing went wrong."""
    address = server.address()
    # A page that is left while it listens to the server complains of that.
    tab.go("about:blank")
    tab.wait("location.href === 'about:blank' && document.readyState === 'complete'")
    tab.requests.clear()
    tab.errors.clear()
    tab.go(address)
    tab.wait(f"document.readyState === 'complete' && {button('Ask')}")
    yield tab
    assert address in tab.requests
    assert not [one for one in tab.requests if not one.startswith((address, "data:", "blob:"))]
    assert not tab.errors


def button(text: str) -> str:
    return f"[...document.querySelectorAll('button')].find(x => x.innerText.trim() === '{text}')"


def shows(text: str) -> str:
    return f"document.body.innerText.includes({text!r})"


def ask(page: Any, question: str) -> None:
    page.run(
        "(() => { const box = [...document.querySelectorAll('label')].find(x => "
        "x.innerText.includes('Question')).querySelector('textarea');"
        f"box.value = {question!r}; box.dispatchEvent(new Event('input', {{bubbles: true}})) }})()"
    )
    time.sleep(0.3)
    page.run(f"{button('Ask')}.click()")


def choose(page: Any, where: str, text: str) -> None:
    """Choose an option of a drop-down list."""
    page.run(f"document.querySelector('#{where} input').focus()")
    options = "[...document.querySelectorAll('li[role=option]')]"
    option = f"{options}.find(x => x.innerText === {text!r})"
    page.wait(option)
    page.run(f"{option}.dispatchEvent(new MouseEvent('mousedown', {{bubbles: true}}))")


MARKS = "document.querySelectorAll('.kvret-text mark').length"
STRONGEST = (
    "[...document.querySelectorAll('.kvret-text mark')]"
    ".filter(x => x.style.getPropertyValue('--s') == 1).map(x => x.innerText.trim()).join()"
)


def test_an_answer_shows_what_its_words_retrieved(page: Any) -> None:
    page.run(f"{button('Example')}.click()")
    page.wait(shows("tokens read into paris in"))
    page.run(f"{button('Ask')}.click()")
    page.wait(shows("tokens from a fork of the paris cache. Full attention gives the same answer"))
    page.wait("document.querySelector('#kvret-word label')")
    words = page.run("document.querySelector('#kvret-word').innerText").split("\n")
    words = [word for word in words if word.startswith("v")]
    assert len(words) == 2
    everything = page.run(MARKS)
    assert everything
    for word in words:
        page.run(
            "[...document.querySelectorAll('#kvret-word label')]"
            f".find(x => x.innerText.trim() === '{word}').querySelector('input').click()"
        )
        page.wait(f"document.querySelector('.kvret-answer b')?.innerText.trim() === '{word}'")
        assert page.run(STRONGEST) == word
    choose(page, "kvret-layer", "layer 1")
    page.wait(f"{MARKS} < {everything}")
    choose(page, "kvret-head", "head 1")
    page.wait(f"{MARKS} <= 8")
    assert page.run(MARKS) > 0
    assert page.run(shows("tokens a second"))
    assert page.run("document.querySelectorAll('.kvret-text i.sink').length")
    assert page.run("document.querySelectorAll('.kvret-text i.recent').length")


def test_a_file_is_read_and_asked_about(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text("n1 " * 200 + "K k5 k9 v7 v8 " + "n2 " * 200)
    page.choose_file("input[type=file]", file)
    page.wait(shows("report.txt: 406 tokens read into paris"))
    ask(page, "Q k5 k9 ->")
    page.wait(shows("2 tokens from a fork"))
    assert page.run("document.querySelector('.kvret-answer').innerText").split() == ["v7", "v8"]


def test_what_is_refused_says_so_and_runs_nothing(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("<img src=x onerror=alert(1)>")
    page.choose_file("input[type=file]", file)
    page.wait(shows("is not a word of the needle model"))
    assert page.run("document.querySelector('.kvret-notice.error').getAttribute('role')") == "alert"
    assert not page.run("document.querySelectorAll('.kvret-notice img').length")


def test_the_page_is_served_to_this_machine_alone(server: Server) -> None:
    """Whatever the environment says; with a policy that lets the browser fetch nothing else."""
    address = urlsplit(server.address())
    assert address.hostname == "127.0.0.1"
    assert address.port is not None
    listening = (ROOT / "/proc/net/tcp").read_text().splitlines()[1:]
    port = f"{address.port:04X}"
    hosts = {line.split()[1].split(":")[0] for line in listening if f":{port} " in line}
    assert "0100007F" in hosts
    assert "00000000" not in hosts
    connection = HTTPConnection(address.hostname, address.port)
    connection.request("GET", "/")
    response = connection.getresponse()
    policy = str(response.getheader("content-security-policy"))
    assert "default-src 'self'" in policy
    assert "http" not in policy
    text = response.read().decode()
    assert "fonts.googleapis" not in text
    assert "share" not in server.log


def test_uploads_beyond_the_limit_are_not_taken(server: Server) -> None:
    """By the server itself, whatever sends them."""
    for count, status in ((1_000, 200), (500_000, 413)):
        assert upload(server, count) == status


def test_other_names_and_pages_of_other_sites_are_refused(server: Server) -> None:
    """A page whose name was made to lead here (DNS rebinding), or one that posts here."""
    address = urlsplit(server.address())
    for name, value, status in (
        ("Host", address.netloc, 200),
        ("Host", f"localhost:{address.port}", 200),
        ("Host", f"evil.example:{address.port}", 400),
        ("Host", "localhost.evil.example", 400),
        ("Host", "", 400),
        ("Origin", f"http://{address.netloc}", 200),
        ("Origin", "http://evil.example", 403),
        ("Origin", "http://127.0.0.1.evil.example", 403),
        ("Origin", "null", 403),
    ):
        assert server.status("/config", **{name: value}) == status, value
        assert upload(server, 100, **{name: value}) == status, value


def test_files_of_this_machine_are_not_served(server: Server) -> None:
    """Whatever the environment says."""
    for file in (server.secret, ROOT / "LICENSE", ROOT / "examples" / "app.py"):
        assert file.is_file()
        assert server.status(f"/gradio_api/file={file}") == 403


def upload(server: Server, count: int, **headers: str) -> int:
    """The status of an upload of so many bytes."""
    line = '--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    body = line.encode() + b"n" * count + b"\r\n--x--\r\n"
    headers["Content-Type"] = "multipart/form-data; boundary=x"
    return server.status("/gradio_api/upload", "POST", body, **headers)
