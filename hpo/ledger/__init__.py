"""Stores every study in one SQL database, the ledger, which is the single source of truth."""

from hpo.ledger.database.store import Ledger

__all__ = ["Ledger"]
