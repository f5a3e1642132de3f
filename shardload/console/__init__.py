"""The pieces of the ``shardload`` command: the command tree, its options, its output, its failures."""
