"""Holds small parts that the packages above use: epochs, seeds, threads, devices, failpoints, dotted names."""
