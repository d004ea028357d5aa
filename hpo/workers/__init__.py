"""Training of claimed trials: the worker's process, attempts, reports, lanes and ranks."""
