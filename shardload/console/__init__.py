"""The ``shardload`` command: its command tree, options, output and failures."""
