"""Implements the ledger's database: its engine, tables, statements and URLs."""
