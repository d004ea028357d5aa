"""Declares and stores studies: loading, checks, identity and budget."""
