"""Stopping strategies: each decides at a report whether a trial goes on."""
