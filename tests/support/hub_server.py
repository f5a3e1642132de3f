"""A Hugging Face Hub on loopback: one repository, its API, and redirects of large files to signed addresses.

GET  /api/models/org/name/revision/main      its commit, and name, size and SHA-256 of its files
GET  /org/name/resolve/<commit>/<file>       a small file; a redirect (302) to /lfs/… for one in LFS
GET  /lfs/<digest>?Signature=…               ranges of a large file, as long as the signature is valid
"""

import contextlib
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/model"
LFS = (".safetensors", ".gguf", ".h5", "tokenizer.json", ".model")
TOKEN = "hf_secret"


class HubServer:
    """Serves a folder as the repository ``org/model``; ``requests`` are (method, path, range) of those that came."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.requests, self.signature, self.is_gated, self.tampered = [], 0, False, set()
        self.flipped = set()  # names of files of which one bit is another than the digest says
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def root(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def files(self):
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())

    def sha256(self, name):
        return hashlib.sha256((self.folder / name).read_bytes()).hexdigest()

    def expire(self):
        """Make all signed addresses invalid."""
        self.signature += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path).strip("/")
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.is_gated and not path.startswith("lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        if path in (f"api/models/{NAME}/revision/main", f"api/models/{NAME}"):
            return self._send(200, json.dumps(self._info()).encode(), {"Content-Type": "application/json"})
        if path.startswith("lfs/"):
            if self.headers.get("Authorization"):
                return self._send(400, b"no token here", {})
            if url.query != f"Signature={self.hub.signature}":
                return self._send(403, b"expired", {})
            name = next(name for name in self.hub.files() if self.hub.sha256(name) == path.removeprefix("lfs/"))
            return self._file(name, {"ETag": f'"{path}"'})
        name = path.removeprefix(f"{NAME}/resolve/{COMMIT}/")
        if name == path or name not in self.hub.files():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"'}
        if not name.endswith(LFS):
            return self._file(name, headers)
        digest = self.hub.sha256(name)
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str((self.hub.folder / name).stat().st_size)}
        elsewhere = self.hub.root.replace("127.0.0.1", "localhost")  # another host, which must not get the token
        address = f"{elsewhere}/lfs/{digest}?Signature={self.hub.signature}"
        return self._send(302, b"", headers | {"Location": address})

    def _info(self):
        siblings = []
        for name in self.hub.files():
            size = (self.hub.folder / name).stat().st_size
            lfs = {"sha256": self.hub.sha256(name), "size": size, "pointerSize": 130} if name.endswith(LFS) else None
            siblings.append({"rfilename": name, "size": size, "blobId": "0" * 40} | ({"lfs": lfs} if lfs else {}))
        return {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}

    def _file(self, name, headers):
        content = (self.hub.folder / name).read_bytes()
        if name in self.hub.tampered:
            content = bytes(len(content))
        if name in self.hub.flipped:
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = headers | {"Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._send(200, content, headers)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if first > last:
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self._send(206, content[first : last + 1], headers)

    def _send(self, code, body, headers):
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)
