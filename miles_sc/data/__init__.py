"""From Samples to the tensors of one rank's micro-batches."""
