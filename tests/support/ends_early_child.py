"""As `together_child`, but the victim ends before it has used anything of shardload."""

import json
import sys
import time

import jax

import shardload  # noqa: F401 - as the script would have used it

if __name__ == "__main__":
    count, index, port = sys.argv[1:4]
    if index == sys.argv[10]:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
        print(json.dumps({"wrong": "raise", "at": time.time()}))  # noqa: T201
        sys.exit("there are no prompts")
    import together_child

    together_child.main(*sys.argv[1:])
