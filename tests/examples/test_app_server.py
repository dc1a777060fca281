"""The app's server: this machine alone, no file of it, and nothing that a page of others asks."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="the extra app is not installed"
    ),
]


class Server:
    """The app in a process of its own.

    Attributes:
        secret: a file that the environment tells Gradio to serve.
        host: address and port of the page.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "secrets").mkdir()
        self.secret = folder / "secrets" / "secret.txt"
        self.secret.write_text("nobody's business")
        self._log = folder / "log"
        options = ("--model", "needle", "--max-upload", "20KB", "--new-tokens", "4")
        environment = {
            **os.environ,
            "GRADIO_TEMP_DIR": str(folder / "uploads"),
            # Whoever set these would open the page to others.
            "GRADIO_SHARE": "True",
            "GRADIO_SERVER_NAME": "0.0.0.0",
            "GRADIO_ALLOWED_PATHS": str(self.secret.parent),
            "GRADIO_LOCAL_DEV_MODE": "1",
        }
        command = [sys.executable, str(ROOT / "examples" / "app.py"), *options]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=folder
            )

    @property
    def log(self) -> str:
        """What it printed."""
        return self._log.read_text()

    def wait(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.log.splitlines():
                if line.startswith("open "):
                    self.host = urlsplit(line.split()[1]).netloc
                    return
            time.sleep(0.1)
        raise AssertionError(f"the app does not serve: {self.log}")

    def answer(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str
    ) -> HTTPResponse:
        """The answer to a request."""
        connection = HTTPConnection(self.host)
        connection.request(method, path, body, {k.replace("_", "-"): v for k, v in headers.items()})
        return connection.getresponse()

    def upload(self, count: int, **headers: str) -> int:
        """The status of an upload of so many bytes."""
        line = '--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
        body = line.encode() + b"n" * count + b"\r\n--x--\r\n"
        headers["Content-Type"] = "multipart/form-data; boundary=x"
        return self.answer("/gradio_api/upload", "POST", body, **headers).status


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("app"))
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=30)


def test_the_page_is_served_to_this_machine_alone(server: Server) -> None:
    """Whatever the environment says; with a policy that lets the browser fetch nothing else."""
    address, _, port = server.host.partition(":")
    assert address == "127.0.0.1"
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    hosts = {line.split()[1].split(":")[0] for line in listening if f":{int(port):04X} " in line}
    assert "0100007F" in hosts and "00000000" not in hosts
    response = server.answer("/")
    policy = str(response.getheader("content-security-policy"))
    assert "default-src 'self'" in policy and "http" not in policy
    assert "fonts.googleapis" not in response.read().decode()
    assert "share" not in server.log


def test_uploads_beyond_the_limit_are_not_taken(server: Server) -> None:
    """By the server itself, whatever sends them."""
    assert (server.upload(1_000), server.upload(500_000)) == (200, 413)


def test_other_names_and_pages_of_other_sites_are_refused(server: Server) -> None:
    """A page whose name was made to lead here (DNS rebinding), or one that posts here."""
    port = server.host.partition(":")[2]
    for name, value, status in (
        *(("Host", server.host, 200), ("Host", f"localhost:{port}", 200), ("Host", "", 400)),
        *(("Host", f"evil.example:{port}", 400), ("Host", "localhost.evil.example", 400)),
        *(("Origin", f"http://{server.host}", 200), ("Origin", "null", 403)),
        ("Origin", "http://evil.example", 403),
        ("Origin", "http://127.0.0.1.evil.example", 403),
    ):
        assert server.answer("/config", **{name: value}).status == status, value
        assert server.upload(100, **{name: value}) == status, value


def test_files_of_this_machine_are_not_served(server: Server) -> None:
    """Whatever the environment says."""
    for file in (server.secret, ROOT / "LICENSE", ROOT / "examples" / "app.py"):
        assert file.is_file()
        assert server.answer(f"/gradio_api/file={file}").status == 403
