"""Examines a training run whose numbers look wrong."""
