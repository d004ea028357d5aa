"""Trains claimed trials: the worker's process, held trials, attempts, reports and ranks."""
