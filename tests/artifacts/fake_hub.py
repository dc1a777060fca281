"""A hub in memory that speaks enough of the protocol for the real huggingface_hub client.

It stands in place of the client's transport. No file goes through LFS. Every request is written
down.
"""

import base64
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import huggingface_hub
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils._http import default_client_factory

# The client's HTTP library is another one by version, of the same interface.
HTTP: Any = importlib.import_module(
    type(huggingface_hub.get_session()).__module__.partition(".")[0]
)


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
        self.commits[sha] = {name: x for name, x in after.items() if x is not None}
        self.refs[ref] = sha
        self.messages.append(message)
        return sha


class Refusal(Exception):
    """An answer that is none, with its status."""

    def __init__(self, status: int, code: str = "", message: str = "", **more: str) -> None:
        self.status, self.code, self.message, self.more = status, code, message, more


class FakeHub:
    """The hub; ``client()`` makes what the real one sends its requests with.

    Attributes:
        repositories: by id.
        users: name by token.
        requests: method and path of each, in order.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.users = {"hf_alice": "alice"}
        self.requests: list[str] = []

    def client(self) -> Any:
        # The client's own hooks know that it may be offline.
        hooks = default_client_factory().event_hooks
        transport = HTTP.MockTransport(self.answer)
        return HTTP.Client(transport=transport, event_hooks=hooks, follow_redirects=True)

    def add(self, repo_id: str, files: dict[str, bytes], ref: str = "main", **kind: bool) -> str:
        """Commit ``files`` to ``repo_id``, which is made if needed; the commit's sha."""
        repository = self.repositories.setdefault(repo_id, Repository(**kind))
        return repository.commit(ref, files, "added by the test")

    def bodies(self) -> list[str]:
        """The downloads so far: requests that sent the content of a file."""
        return [line for line in self.requests if re.match(r"GET .*/resolve/", line)]

    def answer(self, request: Any) -> Any:
        method, path = request.method, request.url.raw_path.decode().partition("?")[0]
        self.requests.append(f"{method} {path}")
        try:
            for methods, pattern, action in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method in methods.split():
                    names = {key: unquote(value) for key, value in match.groupdict("").items()}
                    content, headers = action(self, request, self._user(request), **names)
                    break
            else:
                raise Refusal(404, "NoRoute", f"{method} {path}")
            status = 200
        except Refusal as refusal:
            status, content = refusal.status, {"error": refusal.message, **refusal.more}
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {name: text for name, text in headers.items() if text}
        headers["Content-Length"] = str(len(body))
        return HTTP.Response(status, headers=headers, content=b"" if method == "HEAD" else body)

    def _user(self, request: Any) -> str | None:
        scheme = request.headers.get("Authorization")
        user = None if scheme is None else self.users.get(scheme.removeprefix("Bearer "))
        if scheme is not None and user is None:
            raise Refusal(401, message="Invalid credentials in Authorization header")
        return user

    def _repository(self, user: str | None, repo: str, *, write: bool = False) -> Repository:
        repository = self.repositories.get(repo)
        owner = user is not None and repo.split("/")[0] == user
        if repository is None or (repository.private and not owner):
            # The hub does not tell strangers whether a repository is private or absent.
            raise Refusal(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and not owner:
            raise Refusal(403 if user else 401, message="No write access to this repository")
        return repository

    def _commit(
        self, user: str | None, repo: str, revision: str
    ) -> tuple[Repository, str, dict[str, bytes]]:
        """A repository, and the sha and the files of a commit."""
        repository = self._repository(user, repo)
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, sha, repository.commits[sha]

    # Reading

    def info(self, request: Any, user: str | None, repo: str, revision: str = "main") -> Any:
        repository, sha, files = self._commit(user, repo, revision)
        siblings = [{"rfilename": name} for name in files]
        about = {"id": repo, "sha": sha, "private": repository.private, "siblings": siblings}
        return about, {}

    def tree(self, request: Any, user: str | None, repo: str, revision: str) -> Any:
        _, _, files = self._commit(user, repo, revision)
        return [_entry(name, content) for name, content in files.items()], {}

    def resolve(self, request: Any, user: str | None, repo: str, revision: str, name: str) -> Any:
        _, sha, files = self._commit(user, repo, revision)
        if name not in files:
            raise Refusal(404, "EntryNotFound", f"{name} does not exist")
        return files[name], {"X-Repo-Commit": sha, "ETag": f'"{_git_id(files[name])}"'}

    # Writing

    def create(self, request: Any, user: str | None) -> Any:
        wish = json.loads(request.content)
        if user is None:
            raise Refusal(401, message="Invalid username or password.")
        repo = f"{wish.get('organization') or user}/{wish['name']}"
        url = f"{ENDPOINT}/{repo}"
        if repo in self.repositories:
            raise Refusal(409, message="You already created this model repo", url=url)
        private = bool(wish.get("private")) or wish.get("visibility") == "private"
        self.add(repo, {".gitattributes": b""}, private=private)
        return {"url": url, "name": repo, "id": repo}, {}

    def branch(self, request: Any, user: str | None, repo: str, revision: str) -> Any:
        repository = self._repository(user, repo, write=True)
        if revision in repository.refs:
            raise Refusal(409, message="Reference already exists")
        repository.refs[revision] = repository.refs["main"]
        return {}, {}

    def validate_yaml(self, request: Any, user: str | None) -> Any:
        return {"errors": [], "warnings": []}, {}

    def preupload(self, request: Any, user: str | None, repo: str, revision: str) -> Any:
        self._repository(user, repo, write=True)
        _, _, files = self._commit(user, repo, revision)
        answers = [
            {
                "path": wish["path"],
                "uploadMode": "regular",
                "shouldIgnore": False,
                "oid": _git_id(files[wish["path"]]) if wish["path"] in files else None,
            }
            for wish in json.loads(request.content)["files"]
        ]
        return {"files": answers}, {}

    def commit(self, request: Any, user: str | None, repo: str, revision: str) -> Any:
        self._repository(user, repo, write=True)
        repository, _, _ = self._commit(user, repo, revision)
        files: dict[str, bytes | None] = {}
        message = ""
        for line in request.content.splitlines():
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
        return {"commitUrl": f"{ENDPOINT}/{repo}/commit/{sha}", "commitOid": sha}, {}


REPO, REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", rf"/api/models/{REPO}", FakeHub.info),
    ("GET", rf"/api/models/{REPO}/revision/{REVISION}", FakeHub.info),
    ("GET", rf"/api/models/{REPO}/tree/{REVISION}", FakeHub.tree),
    ("HEAD GET", rf"/{REPO}/resolve/{REVISION}/(?P<name>.+)", FakeHub.resolve),
    ("POST", r"/api/repos/create", FakeHub.create),
    ("POST", r"/api/validate-yaml", FakeHub.validate_yaml),
    ("POST", rf"/api/models/{REPO}/branch/{REVISION}", FakeHub.branch),
    ("POST", rf"/api/models/{REPO}/preupload/{REVISION}", FakeHub.preupload),
    ("POST", rf"/api/models/{REPO}/commit/{REVISION}", FakeHub.commit),
]


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """A file in the listing of a commit."""
    return {"type": "file", "path": name, "size": len(content), "oid": _git_id(content)}
