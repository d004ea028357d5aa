"""Studies derived from a finished one: repeated seeds and ablations."""
