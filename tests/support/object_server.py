"""An object store on loopback with enough of HTTP and S3 to read from; it counts, and misbehaves.

http://127.0.0.1:PORT/bucket/key                      plain HTTP, and S3 and GCS by path
GET /bucket?list-type=2&prefix=…&delimiter=…          the list of S3, and of GCS' XML interface
"""

import contextlib
import re
import socket
import struct
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

BUCKET = "bucket"
LONG_AGO = "Wed, 01 Jan 2025 00:00:00 GMT"
PAGE = 20


class ObjectServer:
    """Serves the files below a folder as the objects of one bucket.

    Attributes of an instance may be changed at any time: ``status`` (path → HTTP status to answer with), ``tampered``
    (path → function of the object's bytes), ``stalled`` (path → how many bytes it sends after the headers, and then
    nothing more), ``dripping`` (paths of which it sends 20 bytes a second), ``cut`` (path → how many answers end in the
    middle), ``moved`` (path → status and address of a redirect), ``page`` (a web page sent in place of the objects in
    ``paged``, or of all with ``*``), ``markers`` (empty objects that stand for folders), ``has_index`` (folders are
    shown by pages with links), ``sends_empty_whole`` (status 200 for a range of an empty object), ``fault`` (called
    with the handler of a request and its key; answers it and returns True, or leaves it; not for requests that come
    through `back_door`).
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.requests = []  # (method, path, (first, last) or None, bytes sent)
        self.headers = []  # of each request
        self.status, self.tampered, self.stalled, self.cut, self.moved = {}, {}, {}, {}, {}
        self.page, self.paged = b"<!DOCTYPE html><title>Log in</title>" * 4, set()
        self.dripping = set()
        self.markers = set()  # empty objects that stand for folders
        self.ignores_ranges = self.has_index = self.is_chunked = self.sends_empty_whole = False
        self.fault = None  # called with the handler of each request and its key: answers, or returns False
        self.is_changed = False
        self.lock = threading.RLock()  # held while objects change, and while an answer is made of them
        self.released = threading.Event()
        self.server = _Server(("127.0.0.1", 0), self.handler())
        self.back = None
        self.thread = _serve(self.server)

    def handler(self):
        return _handler(self)

    @property
    def root(self):
        return _root(self.server)

    def back_door(self):
        """Another address of the same objects, at which ``fault`` is never asked."""
        self.back = _Server(("127.0.0.1", 0), self.server.RequestHandlerClass)
        _serve(self.back)
        return _root(self.back)

    @property
    def http(self):
        return f"{self.root}/{BUCKET}"

    @property
    def s3(self):
        return f"s3://{BUCKET}"

    @property
    def gs(self):
        return f"gs://{BUCKET}"

    @property
    def bytes_sent(self):
        return sum(sent for *_, sent in self.requests)

    def sent_of(self, pattern):
        """Bytes sent of objects whose key matches."""
        return sum(sent for _, key, _, sent in self.requests if key is not None and re.search(pattern, key))

    def environment(self, root=None):
        root = root or self.root
        return {
            "AWS_ENDPOINT_URL": root, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret", "STORAGE_EMULATOR_HOST": root,
        }  # fmt: skip

    def close(self):
        self.released.set()
        for server in filter(None, (self.server, self.back)):
            server.shutdown()
            server.server_close()
        self.thread.join()

    def size(self, key):
        """Of an object; None where there is none."""
        if key in self.markers:
            return 0
        path = self.folder / key
        if not path.is_file():
            return None
        return len(self.tampered[key](path.read_bytes())) if key in self.tampered else path.stat().st_size

    def tag(self, key):
        """The ETag of an object: another one for each version."""
        if key in self.markers:
            return '"marker"'
        found = (self.folder / key).stat()
        return f'"{found.st_ino:x}-{found.st_mtime_ns:x}"'

    def data(self, key, first, last):
        if key in self.tampered:
            return self.tampered[key]((self.folder / key).read_bytes())[first : last + 1]
        with (self.folder / key).open("rb") as file:
            file.seek(first)
            return file.read(last + 1 - first)

    def reset(self):
        """Behave again, and forget what was asked."""
        self.requests.clear()
        self.status.clear()
        self.tampered.clear()
        self.stalled.clear()
        self.cut.clear()
        self.moved.clear()
        self.paged.clear()
        self.dripping.clear()
        self.ignores_ranges = self.has_index = self.is_chunked = self.sends_empty_whole = False
        self.markers.clear()

    def names(self):
        found = (p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())
        return sorted({*found, *self.markers})


class _LostError(Exception):
    """Raised where an answer is to be sent that is to be lost."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Say nothing of a client that is gone, as one that was killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    request_queue_size = 128  # with the 5 by default, connections opened together wait a second for a place


def _serve(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    return thread


def _root(server):
    return f"http://127.0.0.1:{server.server_address[1]}"


def _handler(store):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            self.serve(self._answer)

        def serve(self, answer):
            """Answer; or if a fault put something in the place of the answer (``instead``), do that, and hang up."""
            self.instead = None
            try:
                answer()
            except _LostError:
                self.instead()
                self.drop()
            except (BrokenPipeError, ConnectionResetError):
                pass

        def _answer(self):
            store.headers.append(dict(self.headers))
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            path = urllib.parse.unquote(url.path).strip("/")
            bucket, _, key = path.partition("/")
            if bucket != BUCKET:
                return self._say(404, _xml_error("NoSuchBucket"))
            if self.fails(key):
                return None
            if not key:
                return self._list(query)
            return self._object(key)

        def drop(self):
            """Close the connection at once, with a reset."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)
            self.connection.close()

        def read_body(self):
            """Nothing: what this server is asked has none."""

        def fails(self, key):
            return store.fault is not None and self.server is store.server and store.fault(self, key)

        def refuse(self, code, word, headers):
            self._say(code, _xml_error(word), headers)

        def send(self, code, body, headers):
            self._say(code, body, headers)
            return True

        def _object(self, key):
            if (code := store.status.get(key, store.status.get("*"))) is not None:
                store.requests.append((self.command, key, None, 0))
                return self._say(code, _xml_error("AccessDenied" if code == 403 else "InternalError"))
            if store.has_index and (store.folder / key).is_dir():
                return self._index(store.folder / key)
            if key in store.moved:
                code, location = store.moved[key]
                store.requests.append((self.command, key, None, 0))
                return self._say(code, b"moved", {"Location": location})
            with store.lock:
                is_page = bool({key, "*"} & store.paged)
                if (total := len(store.page) if is_page else store.size(key)) is None:
                    store.requests.append((self.command, key, None, 0))
                    return self._say(404, _xml_error("NoSuchKey"))
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                headers = {"Accept-Ranges": "bytes", "Last-Modified": LONG_AGO}
                if not is_page:
                    headers["ETag"] = store.tag(key)
                    if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
                        return self._say(412, _xml_error("PreconditionFailed"))
                headers |= {"Content-Type": "text/html; charset=utf-8"} if is_page else {}
                if asked is None or store.ignores_ranges or (store.sends_empty_whole and not total):
                    first, last, code = 0, total - 1, 200
                else:
                    first, last, code = int(asked[1]), min(int(asked[2] or total - 1), total - 1), 206
                    if first >= total:
                        return self._say(416, b"", {"Content-Range": f"bytes */{total}"})
                    headers["Content-Range"] = f"bytes {first}-{last}/{total}"
                body = store.page[first : last + 1] if is_page else store.data(key, first, last)
                body = b"" if self.command == "HEAD" else body
            store.requests.append((self.command, key, None if asked is None else (first, last), len(body)))
            if key in store.stalled or key in store.dripping:
                self.send_head(code, headers | {"Content-Length": str(len(body))})
                return self._hold_back(body, store.stalled.get(key))
            if store.cut.get(key, 0):
                store.cut[key] -= 1
                self.close_connection = True
                return self._say(code, body[: len(body) // 2], headers, length=len(body))
            return self._say(code, body, headers, length=last + 1 - first)

        def _hold_back(self, body, count):
            """Send ``count`` bytes, or if that is None, byte by byte; then nothing more."""
            self.close_connection = True
            self.wfile.write(body[: count or 0])
            self.wfile.flush()
            for byte in body if count is None else ():
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if store.released.wait(0.05):
                    return
            store.released.wait()

        def _index(self, folder):
            url = urllib.parse.urlsplit(self.path)
            if not url.path.endswith("/"):
                return self._say(301, b"moved", {"Location": url._replace(path=f"{url.path}/").geturl()})
            names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in folder.iterdir()]
            body = "".join(f'<li><a href="{urllib.parse.quote(name)}">{escape(name)}</a>' for name in ["../", *names])
            if not store.is_chunked:
                return self._say(200, body.encode(), {"Content-Type": "text/html; charset=utf-8"})
            self.send_head(200, {"Content-Type": "text/html", "Transfer-Encoding": "chunked"})
            data = body.encode()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
            return None

        def _list(self, query):
            store.requests.append((self.command, None, None, 0))
            if (code := store.status.get("", store.status.get("*"))) is not None:
                return self._say(code, _xml_error("AccessDenied" if code == 403 else "InternalError"))
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
            with store.lock:
                keys = [key for key in store.names() if key.startswith(prefix)]
                if delimiter:  # what has one after the prefix is shown as a folder
                    keys = sorted({prefix + delimiter.join(key[len(prefix) :].split(delimiter, 1)[:1]) + delimiter
                                   if delimiter in key[len(prefix) :] else key for key in keys})  # fmt: skip
                rest = [key for key in keys if key > query.get("continuation-token", "")]
                page, more = rest[:PAGE], len(rest) > PAGE
                contents = "".join(
                    f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>" if key.endswith("/") else
                    f"<Contents><Key>{escape(key)}</Key><Size>{store.size(key)}</Size><ETag>{escape(store.tag(key))}</ETag>"
                    "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
                    for key in page
                )  # fmt: skip
            following = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
            body = (
                '<?xml version="1.0" encoding="UTF-8"?>'
                '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<Name>{BUCKET}</Name><KeyCount>{len(page)}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
                f"<IsTruncated>{str(more).lower()}</IsTruncated>{following}{contents}</ListBucketResult>"
            )
            return self._say(200, body.encode(), {"Content-Type": "application/xml"})

        def _say(self, code, body, headers=None, *, length=None):
            self.send_head(code, (headers or {}) | {"Content-Length": str(len(body) if length is None else length)})
            if self.command != "HEAD":
                with contextlib.suppress(BrokenPipeError, ConnectionResetError, socket.timeout):
                    self.wfile.write(body)

        def send_head(self, code, headers):
            if self.instead is not None:
                raise _LostError
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.flush()

    return Handler


@contextlib.contextmanager
def served(folder, monkeypatch):
    """A server of a folder, and the environment that leads to it."""
    with contextlib.closing(ObjectServer(folder)) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


def _xml_error(code):
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
