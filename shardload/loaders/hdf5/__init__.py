"""HDF5 files: reading their datasets as tensors, and writing files whose datasets are filled later."""
