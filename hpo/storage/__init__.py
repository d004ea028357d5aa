"""Stores and removes a study's files: the home, buckets and artifacts."""
