"""Samplers: each proposes configurations for new trials."""
