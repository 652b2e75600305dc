"""The score-centering loss: a pure estimator, its weight functions and the loss that feeds it."""
