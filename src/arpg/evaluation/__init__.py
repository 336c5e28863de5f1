"""Evaluation: sampling for an evaluation, features, metrics, sweeps, reconstruction, class accuracy, attention maps."""
