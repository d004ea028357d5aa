"""Implements `hpo serve`, the live pages of a home: its studies, the report of each, and each trial."""
