"""What makes and measures the models of this project; not part of the package."""
