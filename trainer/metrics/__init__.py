"""Numbers about a run: sums over an epoch, the best so far, rates, the progress line."""
