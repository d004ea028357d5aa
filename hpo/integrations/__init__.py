"""Holds callbacks through which the training loops of other libraries report to a trial, stop, save and resume."""
