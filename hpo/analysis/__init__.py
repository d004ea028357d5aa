"""Reads the ledger and changes nothing in the studies it reads."""
