"""Encoders: the rows of a table to arrays, one file for each form of rows."""
