"""Writes and reads checkpoints, which are complete or absent."""
