"""Implements the MLflow tracker: its client, its database, runs, models and the changes that people make there."""
