"""Stand-in of the Hugging Face hub: a server of this process with models, data sets, tokens and commits.

It serves the requests of huggingface_hub for a commit, a list of files, a file, a new repository and a push.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from typing_extensions import override

from rl_plugins import hub_files

TOKEN = "hf_" + "t" * 20
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/(.+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A repository.

    Attributes:
        commits: files of each commit, by the hash of the commit.
        refs: commit of each branch and tag.
        access: `public`, `private` (unknown without the token) or `gated` (known, without files for anybody).
    """

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    access: str = "public"

    def add(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Add a commit with exactly these files, and return its hash."""
        commit = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit

    def commit(self, revision: str) -> str | None:
        """Return the commit of a revision."""
        return self.refs.get(revision) or (revision if revision in self.commits else None)


class StandIn:
    """Repositories of a server, and the requests that it has had.

    Attributes:
        repositories: repositories by name, such as `models/OWNER/NAME`.
        requests: method and path of each request.
        address: address of the server.
        failing: status of each answer instead of an answer; 0 answers.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.address = ""
        self.failing = 0
        self.served = threading.Event()
        self.may_serve = threading.Event()
        self.may_serve.set()

    def add(self, name: str, files: Mapping[str, bytes] | Path, ref: str = "main", access: str = "public") -> str:
        """Add a commit with the files of a mapping or a folder; return the hash of the commit.

        Args:
            name: `models/OWNER/NAME` or `datasets/OWNER/NAME`.
            files: content by path, or folder.
            ref: branch or tag of the commit.
            access: access to the repository.
        """
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        repository = self.repositories.setdefault(name, Repository(access=access))
        return repository.add(files, ref)

    def downloads(self, suffix: str = "") -> list[str]:
        """Return the paths of the files that were downloaded, by the end of their names."""
        return [line.removeprefix("GET ") for line in self.requests if "/resolve/" in line and line.endswith(suffix)
                and line.startswith("GET ")]  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandIn

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.failing:
            self._send(self.hub.failing, b"{}")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif found := _API.fullmatch(path):
            self._api(f"{found[1]}/{found[2]}", found[3], found[4], body)
        elif found := _FILE.fullmatch(path):
            self._file(f"{(found[1] or 'models/').rstrip('/')}/{found[2]}", found[3], found[4])
        else:
            self._refuse(404, "RepoNotFound")

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        """Return a repository that the request may see, after an answer if there is none."""
        repository = self.hub.repositories.get(name)
        if self.headers.get("Authorization") and not self._has_token:
            self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository is None or (repository.access == "private" and not self._has_token):
            self._refuse(404 if self._has_token else 401, "RepoNotFound")
        else:
            return repository
        return None

    def _api(self, name: str, kind: str | None, revision: str | None, body: bytes) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if kind in ("preupload", "commit"):
            self._push(repository, name, kind, body)
            return
        commit = repository.commit(revision or "main")
        if commit is None:
            self._refuse(404, "RevisionNotFound")
        elif kind == "tree":
            files = repository.commits[commit]
            self._json([
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ])  # fmt: skip
        else:
            siblings = [{"rfilename": path} for path in repository.commits[commit]]
            self._json({"id": name.partition("/")[2], "sha": commit, "siblings": siblings, "private": False})

    def _file(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if repository.access == "gated":
            self._refuse(403, "GatedRepo")
            return
        commit = repository.commit(revision)
        content = None if commit is None else repository.commits[commit].get(path)
        if content is None:
            self._refuse(404, "RevisionNotFound" if commit is None else "EntryNotFound")
            return
        if self.command == "GET" and path.endswith(".safetensors"):
            self.hub.served.set()
            self.hub.may_serve.wait(60)
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": str(commit)}
        self._send(200, content, headers)

    def _create(self, request: Mapping[str, Any]) -> None:
        if not self._has_token:
            self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
            return
        name = f"{request.get('organization')}/{request['name']}"
        access = "private" if request.get("private") or request.get("visibility") == "private" else "public"
        repository = self.hub.repositories.setdefault(f"models/{name}", Repository(access=access))
        if not repository.commits:
            repository.add({})
        self._json({"url": f"{self.hub.address}/{name}", "name": name})

    def _push(self, repository: Repository, name: str, kind: str, body: bytes) -> None:
        if not self._has_token:
            self._send(403, b"{}", {"X-Error-Message": "no right to write"})
            return
        if kind == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for file in json.loads(body)["files"]]  # fmt: skip
            self._json({"files": files})
            return
        lines = [json.loads(line) for line in body.splitlines()]
        pushed = {line["value"]["path"]: base64.b64decode(line["value"]["content"])
                  for line in lines if line["key"] == "file"}  # fmt: skip
        removed = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
        before = {path: content for path, content in repository.commits[repository.refs["main"]].items()
                  if path not in removed}  # fmt: skip
        commit = repository.add({**before, **pushed})
        self._json({
            "success": True, "commitOid": commit,
            "commitUrl": f"{self.hub.address}/{name.partition('/')[2]}/commit/{commit}",
        })  # fmt: skip

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving() -> Iterator[StandIn]:
    """Run a stand-in of the hub in this process."""
    stand_in = StandIn()
    handler = type("_HandlerOfOneHub", (_Handler,), {"hub": stand_in})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    stand_in.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.may_serve.set()
        server.shutdown()
        server.server_close()


def environment_of(stand_in: StandIn, cache: Path) -> dict[str, str]:
    """Return the environment variables for processes with the stand-in in place of the hub."""
    return {"HF_ENDPOINT": stand_in.address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


def use(stand_in: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use the stand-in. The library reads the environment once, when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.address)
    template = stand_in.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(hub_files, "_commits_here", {})
    monkeypatch.delenv("HF_TOKEN", raising=False)
