"""Shows a running study on a terminal and in a notebook, for commands and for `hpo.run`."""
