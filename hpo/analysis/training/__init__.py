"""What one configuration's training does: learning-rate and batch-size tests, memory, diagnosis."""
