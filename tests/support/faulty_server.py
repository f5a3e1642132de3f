"""An object store on loopback that fails at random, in a process of its own, as a plan says: see `fault_runs`.

python -m faulty_server FOLDER OTHER     then one JSON object a line on standard input; one comes back for each

``{"plan": {…}}`` begins with new faults, ``{"report": true}`` says which there were. OTHER has other bytes for the
names in FOLDER: a fault may replace the objects by these.
"""

import json
import random
import re
import shutil
import sys
import threading
import time
from pathlib import Path

from object_server import ObjectServer

PASSING = ("late", "reset", "500", "503", "429", "cut", "stall")
"""What the same request may not meet again."""
FINAL = (
    "403", "404", "expired", "no ranges", "shifted", "lying range", "wrong total", "wrong tag", "page", "replaced",
    "deleted", "bad list",
)  # fmt: skip
_LONG_S = 6.0
_NO_PAGES = 6
"""How many requests at least are answered otherwise before web pages come again."""


class Faults:
    """Which requests fail, and how; by a plan: ``seed``, ``kinds``, ``rate``, ``first``, ``sticks`` and ``pages``.

    Of the requests from number ``first`` on, a share of ``rate`` fail, in one of ``kinds``. If it ``sticks``, a request
    for an object that has failed in one of `FINAL` fails so again. A web page comes in place of ``pages`` answers one
    after the other, as of a proxy that wants a login, and then not for a while.
    """

    def __init__(self, server, other, plan):
        self.server, self.other, self.plan = server, Path(other), plan
        self.random, self.lock = random.Random(plan["seed"]), threading.Lock()
        self.count, self.done, self.stuck, self.is_replaced = 0, [], {}, False
        self.running, self.pages = 0, -_NO_PAGES

    def __call__(self, handler, key):
        with self.lock:
            self.running += 1
        try:
            return self._answer(handler, key)
        finally:
            with self.lock:
                self.running -= 1

    def _answer(self, handler, key):
        with self.lock:
            self.count += 1
            if (kind := self.kind_of(key)) is None:
                return False
            self.done.append([kind, key])
        return self.fail(kind, handler, key)

    def kind_of(self, key):
        """The fault that a request is to meet."""
        self.pages -= 1
        if self.pages > 0:
            return "page"
        if (kind := self.stuck.get(key)) is None:
            if self.count <= self.plan["first"] or self.random.random() >= self.plan["rate"]:
                return None
            kind = self.random.choice(self.plan["kinds"])
            if kind == "page":
                if -_NO_PAGES < self.pages < 0:
                    return None
                self.pages = self.plan["pages"]
            elif self.plan["sticks"] and kind in FINAL and kind not in ("replaced", "deleted"):
                self.stuck[key] = kind
        return kind

    def fail(self, kind, handler, key):
        match kind:
            case "late":
                time.sleep(self.random.uniform(0, 0.2))
                return False
            case "500" | "503" | "429" | "403" | "404":
                code = {"403": "AccessDenied", "404": "NoSuchKey"}.get(kind, "SlowDown")
                handler.refuse(int(kind), code, {"Retry-After": "0"} if kind in ("503", "429") else {})
            case "expired":
                handler.refuse(self.random.choice([400, 403]), "ExpiredToken", {})
            case "reset":
                handler.drop()
            case "replaced" | "deleted":
                if key:
                    self._change(kind, key)
                return False
            case "bad list":
                if key:
                    return False
                handler.send(200, b"<ListBucketResult><Contents><Key>x</Ke", {"Content-Type": "application/xml"})
            case "page":
                handler.send(200, self.server.page, {"Content-Type": "text/html; charset=utf-8"})
            case _:
                return bool(key) and self._distort(kind, handler, key)
        return True

    def _change(self, kind, key):
        """All objects of a checkpoint at once are those of the other version, or one is gone."""
        with self.lock:
            self.server.is_changed = True
            if kind == "deleted":
                if (self.server.folder / key).is_file():
                    (self.server.folder / key).unlink()
            elif not self.is_replaced:
                self.is_replaced = True
                top = key.split("/")[0]
                (self.server.folder / top).rename(self.server.folder / f"{top}.old")
                shutil.copytree(self.other / top, self.server.folder / top)

    def _distort(self, kind, handler, key):
        """An answer with something wrong in it, unless the ordinary one would be a refusal."""
        size, asked = self.server.size(key), re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        tag = None if size is None else self.server.tag(key)
        if size is None or handler.headers.get("If-Match", tag) != tag:
            return False
        first, last = (int(asked[1]), min(int(asked[2] or size - 1), size - 1)) if asked else (0, size - 1)
        if first >= size:
            return False
        body = self.server.data(key, first, last)
        headers = {"ETag": tag, "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "Accept-Ranges": "bytes"}
        told, total = (first, last), size
        if kind == "no ranges":
            return handler.send(200, self.server.data(key, 0, size - 1), headers)
        if kind == "wrong tag":
            headers["ETag"] = '"another"'
        elif kind == "wrong total":
            total = size + 1
        elif kind in ("shifted", "lying range"):  # by one byte, which is said, or not
            body = body[1:] + b"x"
            told = (first + 1, last + 1) if kind == "shifted" else told
        headers |= {"Content-Range": f"bytes {told[0]}-{told[1]}/{total}"} if asked else {}
        if kind in ("cut", "stall"):
            handler.send_head(206 if asked else 200, headers | {"Content-Length": str(len(body))})
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            if kind == "stall":
                self.server.released.wait(_LONG_S)
            handler.close_connection = True
            return True
        return handler.send(206 if asked else 200, body, headers)


WRITE_PASSING = ("late", "reset", "500", "503", "429", "cut", "body cut", "timed out", "lost", "held", "stall")
WRITE_FINAL = ("403", "expired", "page")


class WriteFaults(Faults):
    """Faults of a store that is written to: of requests with a body, and of answers to what was done.

    A plan may have ``kill``: at which request, and *before* or *after* it is carried out, ``kill`` is called.
    """

    def __init__(self, server, plan, kill):
        super().__init__(server, server.folder, plan)
        self.kill = kill

    def kind_of(self, key):
        if self.plan.get("kill") and self.count == self.plan["kill"][0]:
            return f"kill {self.plan['kill'][1]}"
        return super().kind_of(key)

    def fail(self, kind, handler, key):
        is_write = handler.command not in ("GET", "HEAD")
        match kind:
            case "kill before":
                self.kill()
                handler.drop()
            case "kill after":
                handler.instead = self.kill
                return False
            case "lost":
                handler.instead = lambda: None
                return False
            case "held":  # the answer is
                handler.instead = lambda: self.server.released.wait(_LONG_S)
                return False
            case "stall" if is_write:
                handler.read_body()
                self.server.released.wait(_LONG_S)
                handler.drop()
            case "body cut" | "timed out" if is_write:
                handler.read_body(0.5)
                if kind == "timed out":
                    handler.close_connection = True
                    handler.refuse(400, "RequestTimeout", {"Connection": "close"})
                handler.drop()
            case "late":
                return super().fail(kind, handler, key)
            case "cut" | "body cut" | "timed out" if is_write or kind != "cut":
                return False
            case _:
                handler.read_body()
                return super().fail(kind, handler, key)
        return True


def main(folder, other):
    source = Path(folder)
    work = source.with_name(f"{source.name}-served")
    shutil.copytree(source, work)
    server = ObjectServer(work)
    tell(server.environment() | {"http": server.http})
    for line in sys.stdin:
        wanted = json.loads(line)
        if "plan" in wanted:
            if server.is_changed:
                server.is_changed = False
                shutil.rmtree(work)
                shutil.copytree(source, work)
            server.has_index = bool(wanted["plan"]) and wanted["plan"]["has_index"]
            server.fault = Faults(server, other, wanted["plan"]) if wanted["plan"] else None
            tell({})
        else:
            faults, server.fault = server.fault, None
            server.released.set()
            until = time.monotonic() + 10  # an answer that nobody reads may not end
            while faults.running and time.monotonic() < until:
                time.sleep(0.01)
            server.released.clear()
            tell({"requests": faults.count, "faults": faults.done})


def tell(what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
