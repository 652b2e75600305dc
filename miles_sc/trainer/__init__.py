"""The built-in trainer: rollout, conversion, training and weight update on Ray, on one machine with or without a GPU."""
