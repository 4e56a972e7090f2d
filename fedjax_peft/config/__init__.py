"""Configurations: the keys of a TOML file, and what is made of them."""
