"""Mirrors the ledger to trackers: the mirror's process, the contents of a run, and MLflow's store and pages."""
