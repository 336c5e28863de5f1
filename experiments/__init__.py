"""What makes and measures the bundled models; not part of the package."""
