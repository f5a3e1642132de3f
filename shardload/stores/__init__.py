"""Byte access to local files and remote stores."""
