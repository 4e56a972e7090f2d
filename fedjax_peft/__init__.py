"""Simulate federated parameter-efficient fine-tuning of transformers, many clients at once."""

__version__ = "0.1.0"
