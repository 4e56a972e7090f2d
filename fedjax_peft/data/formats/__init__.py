"""Formats in which data sets are distributed, each a reader: a folder to tables, or "not mine"."""
