"""Trains trials as lanes of one model: one forward and one backward pass for all of them."""
