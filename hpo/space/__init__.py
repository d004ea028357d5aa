"""Defines the space that a study searches: dimensions, typed configurations, objectives and trial states."""
