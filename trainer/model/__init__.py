"""Operates on whole models: initial weights, precision, averages, checkpointed activations, export."""
