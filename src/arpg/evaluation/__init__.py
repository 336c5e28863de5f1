"""How good images are: a small classifier, reconstruction, diversity and distance to the training images."""
