"""Figures of a study, and the Optuna study they are drawn from."""
