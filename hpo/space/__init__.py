"""The space that a study searches and optimizes: dimensions, typed configurations, objectives and trial states."""
