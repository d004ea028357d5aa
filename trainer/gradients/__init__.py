"""From the losses of micro-batches to the gradient that the optimizer steps on."""
