"""A hub on 127.0.0.1: as much of its HTTP interface as creating a repository, one commit of files and reading need.

Small files come in the commit itself, large ones as blobs, asked for first (git-lfs's batch interface), of which those
that are here already are not sent again. Models that are read lie in directories; the hub misbehaves as it is told.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "3" * 40
TOKEN = "hf_" + "a" * 34
SMALL = 1 << 16


@dataclass
class Repository:
    """What the hub has: path -> content (of a large file its SHA-256), and what was done to it."""

    private: bool
    files: dict[str, bytes | str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """The server's state; a test may change how it behaves.

    Attributes:
        blobs: SHA-256 -> content.
        uploads: how many blobs were sent.
        refuse: (part of a path, status, message) of requests that are refused.
        models: name -> directory of a model that can be read.
        gated: whether only those who are logged in may read.
        ranges: whether parts of files are sent.
        limited: how many more parts are refused, since too much was asked for.
        cut: bytes after which the connection is closed, of every part that is sent.
        expire: whether addresses of files are good for one answer only.
        rate: bytes a second, over all connections; 0: as fast as it goes.
        sent: bytes of weights that were sent.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    uploads: int = 0
    refuse: tuple[str, int, str] | None = None
    requests: list[str] = field(default_factory=list)
    models: dict[str, Path] = field(default_factory=dict)
    gated: bool = False
    ranges: bool = True
    limited: int = 0
    cut: int = 0
    expire: bool = False
    rate: float = 0.0
    sent: int = 0
    signed: int = 0
    spent: set[str] = field(default_factory=set)
    due: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        """It has had no request, and has no repository and no blob."""
        for had in (self.repositories, self.blobs, self.requests):
            had.clear()

    def pace(self, count: int) -> None:
        """Waits as long as so many bytes take."""
        if self.rate:
            with self.lock:
                self.due = max(self.due, time.monotonic() - 0.05) + count / self.rate
                wait = self.due - time.monotonic()
            time.sleep(max(0.0, wait))


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of clients that are gone
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, value: Any, status: int = 200, message: str = "") -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if message:
                self.send_header("X-Error-Message", message)
            self.end_headers()
            self.wfile.write(content)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))

        def handle_all(self) -> None:
            body = self.body()
            hub.requests.append(f"{self.command} {self.path}")
            if hub.refuse is not None and hub.refuse[0] in f"{self.command} {self.path}":
                return self.answer({"error": hub.refuse[2]}, hub.refuse[1], hub.refuse[2])
            if self.command == "PUT" and self.path.startswith("/blob/"):
                hub.blobs[self.path.rsplit("/", 1)[1]] = body
                hub.uploads += 1
                return self.answer({})
            if self.read_model():
                return None
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid credentials"}, 401, "Invalid credentials")
            return self.route(body)

        do_GET = do_POST = do_PUT = do_HEAD = handle_all

        def read_model(self) -> bool:
            """Answers what is asked of a model that lies in a directory; returns whether it was."""
            path = unquote(self.path.partition("?")[0]).removeprefix("/api/models").lstrip("/")
            name = "/".join(path.split("/")[:2])
            if name not in hub.models:
                return False
            if hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer({"error": "Access to this model is restricted"}, 401, "Access to this model is restricted")
                return True
            directory, rest = hub.models[name], path.removeprefix(name).lstrip("/")
            if self.path.startswith("/api/"):
                files = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
                if "tree/" in rest:
                    self.answer(
                        [
                            {"type": "file", "path": f, "oid": "0" * 40, "size": (directory / f).stat().st_size}
                            for f in files
                        ]
                    )
                else:
                    siblings = [{"rfilename": file, "size": (directory / file).stat().st_size} for file in files]
                    self.answer({"id": name, "modelId": name, "private": False, "sha": COMMIT, "siblings": siblings})
                return True
            self.send_file(directory / rest.split("/", 2)[2])
            return True

        def send_file(self, file: Path) -> None:
            if not file.is_file():
                return self.answer({"error": "Entry not found"}, 404, "Entry not found")
            is_weight = file.suffix == ".safetensors"
            is_head = self.command == "HEAD"
            status, size = file.stat(), file.stat().st_size
            if hub.expire and is_weight and "signed=" not in self.path and not is_head:
                return self.answer({}, 403)
            if hub.expire and is_weight and not is_head:
                if self.path in hub.spent:
                    return self.answer({}, 403)
                hub.spent.add(self.path)
            if hub.limited and is_weight and not is_head:
                hub.limited -= 1
                self.send_response(429)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            start, stop = 0, size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            partial = asked is not None and hub.ranges
            if asked is not None and partial:
                start, stop = int(asked[1]), min(size, int(asked[2]) + 1)
            if is_head and hub.expire and is_weight:
                self.send_response(302)
                hub.signed += 1
                self.send_header(
                    "Location", f"{hub.url.replace('127.0.0.1', 'localhost')}{self.path}?signed={hub.signed}"
                )
                self.send_header("X-Linked-Size", str(size))
            else:
                self.send_response(206 if partial else 200)
            if partial:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            etag = f'"{size}-{status.st_mtime_ns}"'
            self.send_header("ETag", etag)
            self.send_header("X-Linked-Etag", etag)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0" if is_head and hub.expire and is_weight else str(stop - start))
            self.end_headers()
            if is_head:
                return None
            with open(file, "rb") as content:
                content.seek(start)
                at = start
                while at < stop:
                    piece = content.read(min(1 << 16, stop - at, hub.cut or stop))
                    hub.pace(len(piece))
                    self.wfile.write(piece)
                    with hub.lock:
                        hub.sent += len(piece) * is_weight
                    at += len(piece)
                    if hub.cut and at - start >= hub.cut and at < stop:
                        self.close_connection = True
                        break
            return None

        def route(self, body: bytes) -> None:
            path = self.path.partition("?")[0]
            if path == "/api/whoami-v2":
                return self.answer({"name": "me", "type": "user", "auth": {}})
            if path == "/api/validate-yaml":
                wrong = [{"message": "bad front matter"}] if "license: !" in json.loads(body)["content"] else []
                return self.answer({"errors": wrong, "warnings": []}, 400 if wrong else 200)
            if path == "/api/repos/create":
                return self.create(json.loads(body))
            name = "/".join(path.removeprefix("/api/models/").removeprefix("/").split("/")[:2]).removesuffix(".git")
            repository = hub.repositories.get(name)
            if repository is None:
                return self.answer({"error": "Repository not found"}, 404, "Repository not found")
            if path.endswith("/info/lfs/objects/batch"):
                return self.batch(json.loads(body))
            if "/preupload/" in path:
                files = json.loads(body)["files"]
                modes = [
                    {"path": f["path"], "uploadMode": "lfs" if f["size"] > SMALL else "regular", "shouldIgnore": False}
                    for f in files
                ]
                return self.answer({"files": modes})
            if "/commit/" in path:
                return self.commit(name, repository, body)
            if "/tree/" in path:
                found = [{"type": "file", "path": p, "oid": "0" * 40, "size": 1} for p in repository.files]
                return self.answer(found)
            return self.answer(self.info(name, repository))

        def info(self, name: str, repository: Repository) -> dict[str, Any]:
            siblings = [{"rfilename": path} for path in repository.files]
            return {"id": name, "modelId": name, "private": repository.private, "sha": "1" * 40, "siblings": siblings}

        def create(self, asked: dict[str, Any]) -> None:
            name = f"{asked['organization']}/{asked['name']}"
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            if name in hub.repositories:
                return self.answer({"error": "exists", "url": f"{hub.url}/{name}"}, 409, "exists")
            hub.repositories[name] = Repository(private)
            return self.answer({"url": f"{hub.url}/{name}", "id": name})

        def batch(self, asked: dict[str, Any]) -> None:
            objects = []
            for each in asked["objects"]:
                entry: dict[str, Any] = {"oid": each["oid"], "size": each["size"]}
                if each["oid"] not in hub.blobs:
                    entry["actions"] = {"upload": {"href": f"{hub.url}/blob/{each['oid']}"}}
                objects.append(entry)
            self.answer({"transfer": "basic", "objects": objects})

        def commit(self, name: str, repository: Repository, body: bytes) -> None:
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    repository.commits.append(value["summary"])
                elif line["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    assert value["oid"] in hub.blobs
                    repository.files[value["path"]] = value["oid"]
                elif line["key"] == "deletedFile":
                    del repository.files[value["path"]]
            oid = "2" * 40
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    return Handler
