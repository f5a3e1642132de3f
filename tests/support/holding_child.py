"""A program that ends while a thread of it holds the weights of a model that follows, and a new step waits for it.

python -m holding_child FOLDER

It follows the steps in FOLDER; step 2 is moved there from its neighbour "next".
"""

import sys
import threading
from pathlib import Path

from process_child import tell
from small_regression import regression

import shardload
from shardload.following.gate import Gate

folder = Path(sys.argv[1])
held, waits = threading.Event(), threading.Event()
swapping = Gate.swapping


def noted(gate):
    if held.is_set():
        waits.set()
    return swapping(gate)


def hold(follower):
    with follower.held() as step:
        tell(held=step)
        held.set()
        threading.Event().wait()


Gate.swapping = noted
follower = shardload.follow(regression("sgd"), folder, every_s=0.01).start()
threading.Thread(target=hold, args=[follower], daemon=True).start()
held.wait()
(folder.parent / "next" / "2").rename(folder / "2")
waits.wait()
tell(waits=True)
