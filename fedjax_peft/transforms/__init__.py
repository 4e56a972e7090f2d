"""Upload transforms: one file per transform, each a tuple of pure functions (see ``Transform``)."""

# Not in __all__, which lists the names that a config file can give.
from fedjax_peft.transforms.chain import chain as chain
from fedjax_peft.transforms.clip import clip_norm

__all__ = ["clip_norm"]
