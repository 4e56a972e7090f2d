"""Differential privacy: one file per mechanism, each a wrapper of any algorithm (``Privacy``)."""

__all__: list[str] = []
