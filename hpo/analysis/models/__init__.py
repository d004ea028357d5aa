"""Finds, averages, promotes and exports models that a study has trained."""
