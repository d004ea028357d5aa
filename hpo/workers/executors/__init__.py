"""Executors: where workers run, how many there are and what each of them has."""
