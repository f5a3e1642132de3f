"""Training steps on disk: published atomically, checked by digest, listed and removed. Never imports JAX."""
