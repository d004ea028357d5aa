"""Analyses studies: results, reports, figures, models and live pages, all read from the ledger."""
