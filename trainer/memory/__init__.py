"""Estimates and bounds the device memory of a step."""
