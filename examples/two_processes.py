"""Two processes load one model onto one mesh, each with four devices, and save and restore it together.

Start both: python examples/two_processes.py 0 run & python examples/two_processes.py 1 run
"""

import sys

if len(sys.argv) != 3 or sys.argv[1] not in ("0", "1"):
    sys.exit("usage: two_processes.py PROCESS FOLDER, once with PROCESS 0 and at the same time with PROCESS 1")

import jax

import shardload  # before Keras, which then runs on JAX

process = int(sys.argv[1])
jax.config.update("jax_num_cpu_devices", 4)  # without accelerators: simulate four devices per process
jax.distributed.initialize("localhost:9173", num_processes=2, process_id=process)

model = shardload.load("gemma3_270m", mesh="1x8")
table = model.backbone.token_embedding.embeddings.value
rows = [shard.index[0].indices(table.shape[0])[:2] for shard in table.addressable_shards]
read = shardload.report(model).bytes.read / 2**20
print(f"process {process} read {read:.0f} MiB, and has rows {rows[0][0]} to {rows[-1][1]} of {table.shape[0]}")

with shardload.Checkpointer(sys.argv[2]) as checkpointer:
    checkpointer.save(1, model)
    checkpointer.wait()
    print(f"process {process} restored step {checkpointer.restore(model).step}")
