"""Looks into a training run, for the questions of a user whose numbers are not what they should be. `fit` needs none
of it but `nonfinite`."""
