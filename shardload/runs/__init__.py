"""Steps saved during training: what a step contains, how it is written and published, listed, ranked and removed."""
