"""Promotion strategies: trials pause at a rung, and the best of them continue."""
