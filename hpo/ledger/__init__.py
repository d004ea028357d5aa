"""The ledger: one SQL database that is the truth about every study."""

from hpo.ledger.store import Ledger

__all__ = ["Ledger"]
