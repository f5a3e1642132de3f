"""GGUF files: `header` parses them, `rows` decodes their quantised tensors, and `loader` makes their manifest."""
