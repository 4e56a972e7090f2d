"""Attacks of hostile clients: one file per attack, each a wrapper of any algorithm (``Attack``)."""

__all__: list[str] = []
