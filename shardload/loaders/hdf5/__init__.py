"""HDF5 files: the datasets in them as tensors, and files whose datasets are yet to be filled."""
