"""Models that a study has trained: found, averaged and exported."""
