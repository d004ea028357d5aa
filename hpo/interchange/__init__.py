"""Carries studies between this platform and other tools: what was searched elsewhere comes in, what was searched here goes out."""
