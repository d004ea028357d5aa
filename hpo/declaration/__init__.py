"""A study as it is declared and stored: loading, checks, identity and budget."""
