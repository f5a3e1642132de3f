"""Jobs of a server: to verify a checkpoint, or to read it before it is needed."""
