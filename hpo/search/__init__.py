"""Decides which configuration is tried next and which trials stop: samplers, stopping, promotion and populations."""
