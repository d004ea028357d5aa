"""Builds optimizers: build.py makes the one that `train.optim` names; their table is in trainer/config/optim.py."""
