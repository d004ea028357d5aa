"""Holds the population strategies, whose trials form generations that start from each other's checkpoints."""
