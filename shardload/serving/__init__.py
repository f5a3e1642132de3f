"""`shardload serve`: a server that hands out the bytes of checkpoints over HTTP. See design note 0042."""
