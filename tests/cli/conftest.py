"""All these tests use the quick encoder."""

from shallow import shallow_encoder

__all__ = ["shallow_encoder"]
