"""Backbones as NNX modules, one file per architecture.

``base`` turns a module into pure functions, ``registry`` knows the families, ``checkpoint`` reads
and writes their files, and ``hub`` loads a model by name.
"""
