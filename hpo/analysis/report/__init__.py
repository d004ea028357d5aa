"""`hpo report`: one page that tells a study, from one structure that is read from the ledger."""
