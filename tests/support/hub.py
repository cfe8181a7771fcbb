"""A Hub for tests: the few endpoints that making a repository and committing to it need, on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Keeps repositories in memory; its users own what is named after them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.users = {"a-token": "ann", "b-token": "bob"}
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.faulty_card = False
        self.sent = 0
        self.most_sent: int | None = None
        """Uploads of large files that are taken; the next ones are refused."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            return self._file(body=True)
        repo = _repo_of(self.path.split("?")[0])
        if "/tree/" in self.path:
            held = self.server.files[repo].items()
            return self._answer(
                200, [{"type": "file", "path": name, "size": len(data), "oid": ""} for name, data in held]
            )
        if repo not in self.server.private:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        files = [{"rfilename": name} for name in self.server.files.get(repo, {})]
        about = {"id": repo, "sha": "0" * 40, "private": self.server.private[repo], "siblings": files}
        return self._answer(200, about)

    def do_PUT(self) -> None:
        data = self._body()
        if self.server.sent == self.server.most_sent:
            return self._answer(403, {"error": "Quota exceeded"})
        self.server.sent += 1
        self.server.blobs[self.path.rpartition("/")[2]] = data
        return self._answer(200, {})

    def do_POST(self) -> None:
        body, user = self._body(), self.server.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        path = self.path.split("?")[0]
        if path == "/api/validate-yaml":
            errors = [{"message": '"license" is not one of the Hub\'s'}] if self.server.faulty_card else []
            return self._answer(400 if errors else 200, {"errors": errors, "warnings": []})
        if user is None:
            return self._answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            return self._create(json.loads(body), user)
        repo = _repo_of(path)
        if repo.split("/")[0] != user:
            return self._answer(403, {"error": "You don't have the rights"})
        if path.endswith("/preupload/main"):
            return self._modes(repo, json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        return self._commit(repo, [json.loads(line) for line in body.decode().splitlines()])

    def _file(self, *, body: bool) -> None:
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        data = self.server.files.get(_repo_of(self.path), {}).get(name)
        if data is None:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        self.send_response(200)
        tag = hashlib.sha256(data).hexdigest()
        for header, value in {"ETag": f'"{tag}"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(data))}.items():
            self.send_header(header, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _create(self, wanted: dict[str, Any], user: str) -> None:
        repo = f"{wanted['organization'] or user}/{wanted['name']}"
        if repo.split("/")[0] != user:
            return self._answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        known = repo in self.server.private
        self.server.private.setdefault(repo, wanted.get("private") or wanted.get("visibility") == "private")
        return self._answer(409 if known else 200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def _modes(self, repo: str, wanted: dict[str, Any]) -> None:
        held, found = self.server.files.get(repo, {}), []
        for name in (file["path"] for file in wanted["files"]):
            large, data = name.endswith((".safetensors", ".png", ".parquet", ".tar")), held.get(name)
            about = {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if data is not None:
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
                about["oid"] = (hashlib.sha256(data) if large else blob).hexdigest()
            found.append(about)
        self._answer(200, {"files": found})

    def _batch(self, wanted: dict[str, Any]) -> None:
        found = [
            {
                "oid": one["oid"],
                "size": one["size"],
                # A file that is there needs no upload.
                **({} if known else {"actions": {"upload": {"href": f"{self.server.url}/blobs/{one['oid']}"}}}),
            }
            for one in wanted["objects"]
            for known in [one["oid"] in self.server.blobs]
        ]
        self._answer(200, {"transfer": "basic", "objects": found})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = self.server.files.setdefault(repo, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                self.server.commits.append(value["summary"])
        self._answer(200, {"success": True, "commitUrl": f"{self.server.url}/{repo}/commit/1", "commitOid": "1"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _repo_of(path: str) -> str:
    """Return the repository that a path names."""
    parts = [part for part in path.split("/") if part not in ("", "api", "models", "datasets")]
    return "/".join(parts[:2]).removesuffix(".git")


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Serve an empty Hub while in the block."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
