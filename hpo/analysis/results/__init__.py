"""Reads the results of a study: best trial, tables, one trial in detail, progress."""
