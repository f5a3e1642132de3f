"""What a server has: its roots, on this machine and at addresses, scanned for checkpoints."""
