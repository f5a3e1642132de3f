"""What becomes of the client's threads when the process ends."""

import subprocess
import sys

from object_server import served

ENDS = """
import asyncio
import hashlib
import sys
import threading
import time
import types
from shardload.stores.requests import Requests

class Last:
    def __del__(self):
        time.sleep(1)  # while the interpreter ends, with its lock released
        print("ended", flush=True)

sys.modules["last"] = types.SimpleNamespace(last=Last())

# A thread of the client that has told the loop, and then works on without Python's lock, as if it got no core.
content, tell = bytes(1 << 25), asyncio.SelectorEventLoop._write_to_self

def tell_and_work(loop):
    tell(loop)
    if isinstance(threading.current_thread(), threading._DummyThread):
        end_s = time.monotonic() + 0.5
        while time.monotonic() < end_s:
            hashlib.sha256(content)

asyncio.SelectorEventLoop._write_to_self = tell_and_work
assert bytes(Requests("{root}/bucket").read("a")) == b"content"
print("done", flush=True)
"""


def test_a_process_ends_with_its_own_exit_code_while_the_client_still_works(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"content")
    with served(tmp_path, monkeypatch) as server:
        code = ENDS.format(root=server.root)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\nended\n", "")
