"""Which configuration comes next and which trials stop: samplers, stopping strategies, promotion and populations."""
