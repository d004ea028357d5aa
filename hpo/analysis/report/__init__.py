"""Implements `hpo report`, which writes one page about a study from one structure read from the ledger."""
