"""Makes studies of commands: the YAML file, the program that it runs, and the exchange between platform and program."""
