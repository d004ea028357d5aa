"""What is done to a model as a whole: initial weights, precision, averages, checkpointed activations, export."""
