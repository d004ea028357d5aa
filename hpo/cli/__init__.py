"""The commands of `hpo`, their options and the live view."""
