"""Training: recipes, the loop, what is trained (a model, a tokenizer), optimisation, distribution, snapshots."""
