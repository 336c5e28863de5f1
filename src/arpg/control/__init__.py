"""Condition images: what is drawn from a picture to steer another."""
