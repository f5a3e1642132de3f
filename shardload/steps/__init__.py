"""Steps of a training run on disk: published whole, checked byte by byte, listed, removed. No JAX in here."""
