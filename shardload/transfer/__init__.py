"""From bytes in files to shards on devices: `planning` decides, `execution` does, `block_copy` moves one block."""
