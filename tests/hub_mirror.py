"""A Hugging Face hub on loopback: as much of its API as a download asks for, and a list of what was asked."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Mirror:
    """``models[id][revision]`` are the files of a revision by name; ``gated`` ids are refused.

    ``fails`` answers every path with that HTTP status; ``babbles`` lists no files but nonsense.
    """

    def __init__(self):
        self.models, self.gated, self.fails, self.babbles = {}, set(), 0, False
        self.asked = []  # (method, path)
        self.url = ""

    def add(self, model, files, revision="main"):
        """Store the files of a revision and return its commit."""
        commit = hashlib.sha1(repr((model, revision, sorted(files.items()))).encode()).hexdigest()
        for name in (revision, commit):
            self.models.setdefault(model, {})[name] = (commit, files)
        return commit

    @property
    def downloads(self):
        """The files whose content was asked for, sorted: a download has several threads."""
        got = [path.split("/resolve/")[1] for method, path in self.asked if method == "GET" and "/resolve/" in path]
        return sorted(path.split("/", 1)[1] for path in got)

    def answer(self, path):
        """The status, the headers and the body for a path."""
        if self.fails:
            return self.fails, {}, b""
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models").split("/")[1:]
        model, kind, revision, name = "/".join(parts[:2]), *(*parts[2:4], "", "")[:2], "/".join(parts[4:])
        if kind not in ("revision", "tree", "resolve"):
            return 404, {}, b""
        if model in self.gated and kind != "revision":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if model not in self.models:  # the hub does not tell strangers whether there is such a model
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if unquote(revision) not in self.models[model]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        commit, files = self.models[model][unquote(revision)]
        known = {"X-Repo-Commit": commit}
        if api and kind == "revision":
            return 200, known, json.dumps({"id": model, "sha": commit, "siblings": []}).encode()
        if api:
            tree = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
            return 200, known, b"{" if self.babbles else json.dumps(tree).encode()
        if name not in files:
            return 404, {**known, "X-Error-Code": "EntryNotFound"}, b""
        return 200, {**known, "ETag": f'"{_etag(files[name])}"'}, files[name]


def _etag(data):
    return hashlib.sha1(data).hexdigest()


@contextmanager
def running():
    """A mirror that listens."""
    mirror = Mirror()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = urlsplit(self.path).path
            mirror.asked.append((self.command, path))
            status, headers, body = mirror.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield mirror
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
