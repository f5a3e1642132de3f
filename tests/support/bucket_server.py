"""A bucket on loopback that can be written to: what S3 and GCS' XML interface have for it, and faults.

PUT /bucket/key                        one object; If-None-Match: * and If-Match, or x-goog-if-generation-match
POST ?uploads, PUT ?partNumber, …      an object in parts, whose parts stay in ``parts`` until it is complete or aborted
DELETE /bucket/key, POST /bucket?delete
"""

import contextlib
import hashlib
import itertools
import re
import urllib.parse
from xml.sax.saxutils import escape, unescape

from object_server import BUCKET, ObjectServer, _handler, _xml_error


class BucketServer(ObjectServer):
    """An `ObjectServer` that also writes. Attributes that may be changed at any time:

    ``refused`` (pattern of keys → HTTP status of every write), ``faults`` (pattern of keys → list of what the next
    writes meet: a status, ``(503, seconds to wait)``, or "reset"), ``on_put`` (called with each key before it is
    written), ``has_bucket``, ``keeps`` (pattern of keys that may not be deleted, or None).
    """

    def __init__(self, folder):
        self.parts, self.refused, self.faults, self.writes = {}, {}, {}, []
        self.on_put = lambda key: None
        self.has_bucket = True
        self.keeps = None
        self.generations = {}
        self.numbers = itertools.count(1)
        super().__init__(folder)

    def tag(self, key):
        return f'"{hashlib.md5((self.folder / key).read_bytes()).hexdigest()}"'

    def handler(self):
        return _writing(self, _handler(self))

    def write(self, key, data):
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.folder.parent / f"draft-{next(self.numbers)}"
        draft.write_bytes(data)
        draft.replace(path)
        self.generations[key] = next(self.numbers)

    def remove(self, key):
        path = self.folder / key
        path.unlink(missing_ok=True)
        while path.parent != self.folder and path.parent.is_dir() and not any(path.parent.iterdir()):
            path = path.parent
            with contextlib.suppress(OSError):
                path.rmdir()

    def fault_of(self, key):
        for pattern, code in self.refused.items():
            if re.search(pattern, key):
                return code
        for pattern, left in self.faults.items():
            if left and re.search(pattern, key):
                return left.pop(0)
        return None


def _writing(store, base):
    class Handler(base):
        def do_PUT(self):  # noqa: N802
            self.serve(self._write)

        do_POST = do_DELETE = do_PUT  # noqa: N815

        def read_body(self, share=1.0):
            """The body of this request; with a ``share``, the beginning of it."""
            if self.headers.get("Transfer-Encoding") == "chunked":
                raise AssertionError("chunked")
            return self.rfile.read(int(share * int(self.headers.get("Content-Length") or 0)))

        def _write(self):
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            bucket, _, key = urllib.parse.unquote(url.path).strip("/").partition("/")
            if bucket != BUCKET or not store.has_bucket:
                self.read_body()
                return self._say(404, _xml_error("NoSuchBucket"))
            if self.fails(key):
                return None
            body = self.read_body()
            store.writes.append((self.command, key, len(body)))
            if (fault := store.fault_of(key)) is not None:
                return self._fail(fault)
            with store.lock:
                return self._change(key, query, body)

        def _change(self, key, query, body):
            if "delete" in query:
                return self._bulk(body.decode())
            if self.command == "DELETE" and "uploadId" in query:
                store.parts.pop(query["uploadId"], None)
                return self._say(204, b"")
            if query.get("uploadId", "") not in ("", *store.parts):
                return self._say(404, _xml_error("NoSuchUpload"))
            if self.command == "DELETE":
                found = (store.folder / key).is_file()
                store.remove(key)
                return self._say(204 if found or "x-amz-date" in self.headers else 404, b"")
            if self.command == "POST":
                return self._parts(key, query)
            if "partNumber" in query:
                store.parts[query["uploadId"]][int(query["partNumber"])] = body
                return self._say(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
            store.on_put(key)
            if not self._may_replace(key):
                return self._say(412, _xml_error("PreconditionFailed"))
            store.write(key, body)
            return self._say(200, b"", self._of(key))

        def _of(self, key):
            return {"ETag": store.tag(key), "x-goog-generation": str(store.generations.get(key, 1))}

        def _may_replace(self, key):
            there = (store.folder / key).is_file()
            if self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0":
                return not there
            if (wanted := self.headers.get("If-Match")) is not None:
                return there and store.tag(key) == wanted
            if (wanted := self.headers.get("x-goog-if-generation-match")) is not None:
                return there and str(store.generations.get(key, 1)) == wanted
            return True

        def _fail(self, fault):
            if fault == "reset":
                self.close_connection = True
                self.connection.shutdown(2)
                return None
            code, pause = fault if isinstance(fault, tuple) else (fault, None)
            name = {403: "AccessDenied", 503: "SlowDown"}.get(code, "InternalError")
            body = _xml_error(name).replace(b"</Error>", b"<RequestId>REQ123</RequestId></Error>")
            return self._say(code, body, {} if pause is None else {"Retry-After": str(pause)})

        def _bulk(self, body):
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body)]
            told = ""
            for key in keys:
                if store.keeps and re.search(store.keeps, key):
                    why = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
                    told += f"<Error><Key>{escape(key)}</Key>{why}</Error>"
                    continue
                store.writes.append(("DELETE", key, 0))
                store.remove(key)
                told += f"<Deleted><Key>{escape(key)}</Key></Deleted>"
            return self._say(200, f"<DeleteResult>{told}</DeleteResult>".encode())

        def _parts(self, key, query):
            if "uploads" in query:
                number = str(next(store.numbers))
                store.parts[number] = {}
                return self._say(
                    200,
                    f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key>"
                    f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode(),
                )
            store.on_put(key)
            parts = store.parts.pop(query["uploadId"])
            store.write(key, b"".join(parts[number] for number in sorted(parts)))
            kind, tag = "CompleteMultipartUploadResult", escape(store.tag(key))
            return self._say(200, f"<{kind}><ETag>{tag}</ETag></{kind}>".encode(), self._of(key))

        def send_head(self, code, headers):
            # GCS tells the generation of what it sends.
            if "ETag" in headers and "x-goog-generation" not in headers:
                key = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").partition("/")[2]
                headers = headers | {"x-goog-generation": str(store.generations.get(key, 1))}
            super().send_head(code, headers)

    return Handler


@contextlib.contextmanager
def bucket(folder, monkeypatch):
    """A server of a bucket that can be written to, and the environment that leads to it."""
    with contextlib.closing(BucketServer(folder)) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
