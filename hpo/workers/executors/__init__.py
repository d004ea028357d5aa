"""Implements executors: where workers run, how many there are, and the resources of each."""
