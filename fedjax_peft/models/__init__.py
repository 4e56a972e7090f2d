"""Backbones as NNX modules, one file per architecture; ``hf`` loads them, ``base`` binds them."""
