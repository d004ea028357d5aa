"""Serves the pages of MLflow and optuna-dashboard over a home for `hpo ui`, on loopback, behind a token."""
