"""Training: recipes, the loops, optimisation, distribution, snapshots."""
