"""Text to token ids and back, and text from a prompt."""
