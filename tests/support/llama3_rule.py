"""Llama 3's rule for rotary frequencies, written as llama.cpp stores it: factors, not angles."""

import numpy as np


def llama3_factors(scaling, *, theta, head_dim):
    """Return the factors by which the rule slows each of ``head_dim // 2`` rotary frequencies."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
