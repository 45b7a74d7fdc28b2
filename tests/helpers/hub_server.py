"""A hub on 127.0.0.1: as much of its HTTP interface as creating a repository and one commit of files need.

Small files come in the commit itself, large ones as blobs, asked for first (git-lfs's batch interface), of which those
that are here already are not sent again.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    uploads: int = 0
    refuse: tuple[str, int, str] | None = None
    requests: list[str] = field(default_factory=list)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
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
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer({"error": "Invalid credentials"}, 401, "Invalid credentials")
            return self.route(body)

        do_GET = do_POST = do_PUT = handle_all

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
