"""A command that is a study: its YAML file, the program that runs it, what passes between the two."""
