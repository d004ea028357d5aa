"""Callbacks by which other libraries' own training loops report to a trial, are stopped by it, save and resume."""
