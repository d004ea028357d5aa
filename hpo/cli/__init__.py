"""Holds the commands of `hpo` and their options."""
