"""Readers of bytes: where extents live."""
