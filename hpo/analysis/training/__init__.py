"""Examines the training of one configuration: learning-rate and batch-size tests, memory, diagnosis."""
