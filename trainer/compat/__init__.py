"""Holds all uses of torch's private names, each with the version of torch in which it was seen last."""
