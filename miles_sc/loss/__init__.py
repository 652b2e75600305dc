"""Losses and what they are made of: candidate scoring, the score-centering estimator, regularizers, reduction."""
