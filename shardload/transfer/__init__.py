"""From bytes in files to shards on devices.

    planning ─► load_plan ─► execution: workers move blocks ─► jax.Array (placement)
    (decides)   (values)       byte_source ─► scratch, or the shards (placement), in host_memory

A block is a range of a file that is read in one go; scratch is a thread's own buffer between file and shards.
`geometry` knows where elements lie in files, `scratch` how a block lies in memory, `preadv` how one system call fills
many places; `read_tensor` reads whole tensors for code that computes with them; `casts` says which casts are allowed.
"""
