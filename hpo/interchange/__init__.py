"""Carries studies between this platform and other tools: imports and exports."""
