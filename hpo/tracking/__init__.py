"""The ledger as MLflow shows it: the mirror's process, what a run shows, MLflow's store and pages."""
