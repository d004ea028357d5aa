"""What a study has found: best trial, tables, one trial in detail, progress."""
