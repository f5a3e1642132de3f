"""From bytes in files to shards on devices: `planning` decides, `execution` does, `block_copy` moves one block.

`scratch` has the layout of a block in memory, and the copy from there into a shard.
"""
