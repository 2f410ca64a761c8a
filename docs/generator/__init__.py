"""Writes the generated parts of the documentation; not part of the package."""
