"""Condition images: what they are, and how they are taken from pictures."""
