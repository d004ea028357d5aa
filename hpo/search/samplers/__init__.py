"""Holds the samplers, which propose configurations for new trials."""
