"""Errors, files and texts: what every part of the package uses, from the standard library alone."""
