"""Holds the numbers of a run: sums over an epoch, the best value so far, rates, and the progress line."""
