"""`hpo serve`: the pages of a home, live from the ledger: its studies, the report of each, each trial."""
