"""A tiny checkpoint of one layer, whose programs compile in about half of the time."""

from pathlib import Path

from internals import save_checkpoint

from fedjax_peft import testing


def write_checkpoint(directory: Path) -> Path:
    """Writes what ``testing.write_tiny_checkpoint`` writes, without the second layer."""
    testing.write_tiny_checkpoint(directory)
    model = testing.tiny_model(num_hidden_layers=1)
    save_checkpoint(model.frozen, model.config, directory, ())
    return directory
