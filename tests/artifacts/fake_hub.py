"""A hub on 127.0.0.1 that speaks enough of the protocol for the real huggingface_hub client.

Repositories live in memory, and no file goes through LFS. Every request is written down.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Commits by sha, each with the bytes of its files; branches by name."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, ref: str, files: Mapping[str, bytes | None], message: str) -> str:
        """Put ``files`` on top of ``ref``; the new sha. None for a file's content deletes it."""
        after = {**self.commits.get(self.refs.get(ref, ""), {}), **files}
        sha = hashlib.sha1(f"{id(self)} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = {
            name: content for name, content in after.items() if content is not None
        }
        self.refs[ref] = sha
        self.messages.append(message)
        return sha

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """``(sha, files)`` of a branch or a commit; None if there is none."""
        sha = self.refs.get(revision, revision)
        return (sha, self.commits[sha]) if sha in self.commits else None


class FakeHub(ThreadingHTTPServer):
    """The server; ``url`` is its endpoint. Use it as a context manager.

    Attributes:
        repositories: by id.
        users: name by token.
        requests: method and path of each, in order.
        faults: exceptions in handlers, which a test must find empty.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.users = {"hf_alice": "alice"}
        self.requests: list[str] = []
        self.faults: list[BaseException] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()

    def add(self, repo_id: str, files: dict[str, bytes], ref: str = "main", **kind: bool) -> str:
        """Commit ``files`` to ``repo_id``, which is made if needed; the commit's sha."""
        repository = self.repositories.setdefault(repo_id, Repository(**kind))
        return repository.commit(ref, files, "added by the test")

    def bodies(self) -> list[str]:
        """The downloads so far: requests that sent the content of a file."""
        return [line for line in self.requests if re.match(r"GET .*/resolve/", line)]


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **more: str) -> None:
        self.status, self.code, self.message, self.more = status, code, message, more


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output clean."""

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {path}")
        try:
            user = self._user()
            for command, pattern, action in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in command.split():
                    action(self, user, **{k: unquote(v) for k, v in match.groupdict("").items()})
                    return
            raise _Refusal(404, "NoRoute", f"{self.command} {path}")
        except _Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            headers = {name: text for name, text in headers.items() if text}
            self._send({"error": refusal.message, **refusal.more}, refusal.status, headers)
        except (KeyError, ValueError, TypeError) as fault:
            self.server.faults.append(fault)
            self._send({"error": repr(fault)}, 500)

    def _send(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _user(self) -> str | None:
        scheme = self.headers.get("Authorization")
        if scheme is None:
            return None
        user = self.server.users.get(scheme.removeprefix("Bearer "))
        if user is None:
            raise _Refusal(401, message="Invalid credentials in Authorization header")
        return user

    def _repository(self, user: str | None, repo: str, *, write: bool = False) -> Repository:
        repository = self.server.repositories.get(repo)
        owner = user is not None and repo.split("/")[0] == user
        if repository is None or (repository.private and not owner):
            # The hub does not tell strangers whether a repository is private or absent.
            raise _Refusal(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and not owner:
            raise _Refusal(403 if user else 401, message="No write access to this repository")
        return repository

    def _commit(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        result = repository.files(revision)
        if result is None:
            raise _Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return result

    # Reading

    def info(self, user: str | None, repo: str, revision: str = "main") -> None:
        repository = self._repository(user, repo)
        sha, files = self._commit(repository, revision)
        siblings = [{"rfilename": name} for name in files]
        self._send({"id": repo, "sha": sha, "private": repository.private, "siblings": siblings})

    def tree(self, user: str | None, repo: str, revision: str) -> None:
        _, files = self._commit(self._repository(user, repo), revision)
        self._send([_entry(name, content) for name, content in files.items()])

    def resolve(self, user: str | None, repo: str, revision: str, name: str) -> None:
        sha, files = self._commit(self._repository(user, repo), revision)
        headers = {"X-Repo-Commit": sha}
        if name not in files:
            raise _Refusal(404, "EntryNotFound", f"{name} does not exist")
        self._send(files[name], headers={**headers, "ETag": f'"{_git_id(files[name])}"'})

    # Writing

    def create(self, user: str | None) -> None:
        wish = json.loads(self.body)
        if user is None:
            raise _Refusal(401, message="Invalid username or password.")
        repo = f"{wish.get('organization') or user}/{wish['name']}"
        url = f"{self.server.url}/{repo}"
        if repo in self.server.repositories:
            raise _Refusal(409, message="You already created this model repo", url=url)
        private = bool(wish.get("private")) or wish.get("visibility") == "private"
        self.server.add(repo, {".gitattributes": b""}, private=private)
        self._send({"url": url, "name": repo, "id": repo})

    def branch(self, user: str | None, repo: str, revision: str) -> None:
        repository = self._repository(user, repo, write=True)
        if revision in repository.refs:
            raise _Refusal(409, message="Reference already exists")
        repository.refs[revision] = repository.refs["main"]
        self._send({})

    def validate_yaml(self, user: str | None) -> None:
        self._send({"errors": [], "warnings": []})

    def preupload(self, user: str | None, repo: str, revision: str) -> None:
        repository = self._repository(user, repo, write=True)
        _, files = self._commit(repository, revision)
        answers = [
            {
                "path": wish["path"],
                "uploadMode": "regular",
                "shouldIgnore": False,
                "oid": _git_id(files[wish["path"]]) if wish["path"] in files else None,
            }
            for wish in json.loads(self.body)["files"]
        ]
        self._send({"files": answers})

    def commit(self, user: str | None, repo: str, revision: str) -> None:
        repository = self._repository(user, repo, write=True)
        self._commit(repository, revision)
        files: dict[str, bytes | None] = {}
        message = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert entry["key"] == "deletedFile"
                files[value["path"]] = None
        sha = repository.commit(revision, files, message)
        self._send({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha})


_REPO, _REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", rf"/api/models/{_REPO}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/revision/{_REVISION}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}", _Handler.tree),
    ("HEAD GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<name>.+)", _Handler.resolve),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", rf"/api/models/{_REPO}/branch/{_REVISION}", _Handler.branch),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", _Handler.commit),
]


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """A file in the listing of a commit."""
    return {"type": "file", "path": name, "size": len(content), "oid": _git_id(content)}
