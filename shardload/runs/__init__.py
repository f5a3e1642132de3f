"""Training steps: what a step contains, how it is written and published, listed, ranked and removed."""
