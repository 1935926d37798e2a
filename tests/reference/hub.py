"""A hub on loopback: the part of huggingface.co's interface that huggingface_hub uses to find and download a model.

Large files are redirected to another host, as the real one's are, with the headers that tell what they are. Files are
pushed to it in a commit's own text. It refuses a card whose base model is no name of a model, as the real one does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import ModelCard, constants, file_download, hf_api
from huggingface_hub.utils import _http, close_session

from reference.small import BLOCKS, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

NAME = "org/small"
_NO_REPOSITORY = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
HEADER_BYTES = 100_001
"""The length that huggingface_hub asks for when it wants a safetensors header."""


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    range: str | None
    authorized: bool
    query: str = ""


@dataclass
class Repository:
    """Files at a commit, and the names of that commit; `error` is (status, X-Error-Code) of every answer on files."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    refs: tuple[str, ...] = ("main",)
    error: tuple[int, str] | None = None
    downloads: int = 0
    titles: tuple[str, ...] = ("Upload model",)
    """Those of its commits, the newest first."""

    @property
    def tags(self) -> list[str]:
        """Those of its card, as the real hub has them."""
        return list(ModelCard(self.files.get("README.md", b"").decode()).data.tags or [])

    @classmethod
    def of(cls, folder: Path, **more: bytes) -> Repository:
        return cls({file.name: file.read_bytes() for file in folder.iterdir()} | more)


@dataclass
class Hub:
    """The repositories served, the requests received, and the faults to make.

    `cut` is for how many bytes of a large file are sent before the connection breaks, each once; with `stall` it does
    not break but waits. `listing` is the answer of a search, in place of the repositories that fit.
    """

    port: int = 0
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    status: int | None = None
    cut: list[int] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    stall: bool = False
    corrupt: bool = False
    listing: Any = None  # Any: JSON, also such as no hub sends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def downloads(self) -> list[Asked]:
        """The requests for more than the header of a large file."""
        headers = f"bytes=0-{HEADER_BYTES - 1}"
        return [asked for asked in self.asked if asked.path.startswith("/cdn/") and asked.range != headers]

    def downloaded(self) -> set[str]:
        """The SHA-256 of these files."""
        return {asked.path.removeprefix("/cdn/") for asked in self.downloads()}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def save_sharded(folder: Path) -> Path:
    """A llama, as on the hub."""
    make_model("llama", tied=False).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > BLOCKS
    return folder


@contextmanager
def the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that huggingface_hub knows, as if the environment had named it before the import."""
    with serve_hub() as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # as the program starts: libraries stay off the network
        monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # else small files are of one chunk
        monkeypatch.setattr(file_download, "time", _Unhurried)
        monkeypatch.setattr(_http, "time", _Unhurried)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)  # of functions that are imported from huggingface_hub
        monkeypatch.setenv("LLMNODE_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("NO_PROXY", "*")
        close_session()
        new_caches(tmp_path / "first", monkeypatch)
        yield hub
        close_session()


class _Unhurried:
    """Stands in for the module `time`, for code that would sleep before it tries again."""

    @staticmethod
    def sleep(_seconds: float) -> None:
        pass


def new_caches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path / "hub"))
    monkeypatch.setenv("LLMNODE_CACHE", str(path / "ours"))


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = _Server(("127.0.0.1", 0), Handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_arguments: object) -> None:
        """A client that was killed, or goes without a word."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # huggingface_hub's, about itself
            return self._answer(404)
        if self._is_refused(path):
            return None
        if path == "/api/models":
            return self._list(parse_qs(urlsplit(self.path).query))
        if path.startswith("/api/models/"):
            return self._model_info(path.removeprefix("/api/models/"))
        if path.startswith("/cdn/"):
            return self._large_file(path.removeprefix("/cdn/"))
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        return self._resolve(name, *rest.split("/", 1))

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self._is_refused(path):
            return None
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.repositories.setdefault(name, Repository({}))
            return self._answer_json({"url": f"{self.hub.url}/{name}"})
        if path == "/api/validate-yaml":
            base = ModelCard(json.loads(content)["content"]).data.base_model
            if base is None or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base):
                return self._answer_json({"errors": [], "warnings": []})
            says = f'"base_model" with value "{base}" is not valid. Use a model id from https://hf.co/models.'
            return self._answer_json({"errors": [{"message": says}], "warnings": []}, 400)
        name, _, rest = path.removeprefix("/api/models/").partition("/preupload/")
        if rest:
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(content)["files"]]
            return self._answer_json({"files": [{**each, "shouldIgnore": False} for each in files]})
        return self._commit(name.partition("/commit/")[0], content)

    def _commit(self, name: str, content: bytes) -> None:
        repository = self.hub.repositories[name]
        for line in map(json.loads, content.splitlines()):
            if line["key"] == "file":
                repository.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        repository.commit = hashlib.sha1(content).hexdigest()
        url = f"{self.hub.url}/{name}/commit/{repository.commit}"
        return self._answer_json({"commitUrl": url, "commitOid": repository.commit})

    def _list(self, query: dict[str, list[str]]) -> None:
        found: list[dict[str, Any]] = [
            {
                "id": name,
                "sha": each.commit,
                "tags": each.tags,
                "downloads": each.downloads,
                "lastModified": "2026-01-31T12:00:00.000Z",
            }
            for name, each in self.hub.repositories.items()
            if {*query["filter"]} <= {*each.tags}
        ]
        found.sort(key=lambda each: -each[query["sort"][0]])
        return self._answer_json(found[: int(query["limit"][0])] if self.hub.listing is None else self.hub.listing)

    def _is_refused(self, path: str) -> bool:
        """Notes what is asked. True if all is answered with an error, as this was."""
        url, headers = urlsplit(self.path), self.headers
        asked = Asked(self.command, path, headers.get("Range"), headers.get("Authorization") is not None, url.query)
        self.hub.asked.append(asked)
        if self.hub.status is not None:
            self._answer(self.hub.status)
        return self.hub.status is not None

    def _commits(self, name: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._answer(401, _NO_REPOSITORY)
        older = [hashlib.sha1(title.encode()).hexdigest() for title in repository.titles[1:]]
        more = {"date": "2026-01-31T12:00:00.000Z", "authors": [{"user": "me"}], "message": ""}
        commits = zip([repository.commit, *older], repository.titles, strict=True)
        found = [{"id": commit, "title": title, **more} for commit, title in commits]
        return self._answer_json(found if self.hub.listing is None else self.hub.listing)

    def _model_info(self, path: str) -> None:
        if path.endswith("/commits/main"):
            return self._commits(path.removesuffix("/commits/main"))
        name, _, revision = path.partition("/revision/")
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._answer(401, _NO_REPOSITORY)
        if revision not in ("", repository.commit, *repository.refs):
            return self._answer(404, {"X-Error-Code": "RevisionNotFound"})
        info = {
            "id": name,
            "sha": repository.commit,
            "siblings": [{"rfilename": file} for file in sorted(repository.files)],
        }
        return self._answer_json(info)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._answer(401, _NO_REPOSITORY)
        assert revision in (repository.commit, *repository.refs)
        if repository.error is not None:
            status, code = repository.error
            return self._answer(status, {"X-Error-Code": code} if code else {})
        headers = {"X-Repo-Commit": repository.commit}
        content = repository.files.get(file)
        if content is None:
            return self._answer(404, {**headers, "X-Error-Code": "EntryNotFound"})
        if not file.endswith(".safetensors"):
            return self._answer(200, {**headers, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content)
        linked = {"X-Linked-ETag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
        elsewhere = {"Location": f"http://localhost:{self.hub.port}/cdn/{sha256(content)}"}
        return self._answer(302, {**headers, **linked, **elsewhere})

    def _large_file(self, etag: str) -> None:
        files = [file for repository in self.hub.repositories.values() for file in repository.files.values()]
        content = next(file for file in files if sha256(file) == etag)
        asked = self.headers.get("Range")
        if asked is None:
            return self._answer(200, {}, self._spoiled(content), cuttable=True)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        end = min(int(last) + 1, len(content)) if last else len(content)
        headers = {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
        return self._answer(206, headers, content[int(first) : end], cuttable=not last)

    def _spoiled(self, content: bytes) -> bytes:
        return content[:-1] + bytes([content[-1] ^ 1]) if self.hub.corrupt else content

    def _answer_json(self, value: Any, status: int = 200) -> None:  # Any: JSON
        self._answer(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", *, cuttable: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if not cuttable or not self.hub.cut:
            self.wfile.write(body)
            return
        self.wfile.write(body[: self.hub.cut.pop(0)])
        self.wfile.flush()
        if self.hub.stall:
            self.hub.released.wait()
        self.close_connection = True
