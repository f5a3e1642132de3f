"""Real Gemma 3 270M for tests: ``from gguf_fixture import gemma3_gguf``."""

import pytest
from checkpoints import gemma3_gguf_path


@pytest.fixture(scope="session")
def gemma3_gguf():
    """Path of the real 4-bit Gemma 3 270M GGUF file (238 MB), assembled once into the user's cache."""
    return gemma3_gguf_path()
