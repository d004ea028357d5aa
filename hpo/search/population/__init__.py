"""Population strategies: trials come in generations that start from each other's checkpoints."""
