"""Cleans a corpus: rules of quality, duplicates, personal data, leaks of a validation text, perplexity. Torch-free."""
