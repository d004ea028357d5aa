"""Optimizers: build.py makes the one that `train.optim` names; the table of them is in trainer/config/optim.py."""
