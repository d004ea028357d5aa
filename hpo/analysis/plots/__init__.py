"""Draws figures of a study, and builds the Optuna study that they show."""
