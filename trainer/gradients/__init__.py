"""Turns the losses of micro-batches into the gradient that the optimizer steps on."""
