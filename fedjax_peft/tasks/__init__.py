"""What is learned: losses and metrics over outputs, labels and masks."""

from fedjax_peft.tasks.classification import classification

__all__ = ["classification"]
