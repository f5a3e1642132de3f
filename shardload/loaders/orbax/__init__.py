"""Orbax checkpoints: OCDBT and zarr arrays as tensors, and saving with Orbax."""
