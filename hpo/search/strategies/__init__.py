"""Holds the stopping strategies: each decides at a report whether a trial continues."""
