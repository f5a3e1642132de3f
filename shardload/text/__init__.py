"""Tokenizers of checkpoints, KerasHub's preprocessors, and generation of text from prompts."""
