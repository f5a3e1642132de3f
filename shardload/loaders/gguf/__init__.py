"""GGUF files: header, rows of quantised blocks, and the manifest made of both."""
