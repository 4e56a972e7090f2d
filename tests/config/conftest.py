"""All these tests use the quick encoder; some of those that train take the simplest one."""

from shallow import shallow_encoder, simple_encoder

__all__ = ["shallow_encoder", "simple_encoder"]
