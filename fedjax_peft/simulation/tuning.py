"""The names of the metrics of tuned models (``Algorithm.tuning``)."""

from fedjax_peft.simulation.rows import Row

__all__ = ["tuned_figures"]


def tuned_figures(row: Row) -> Row:
    """Returns the scores of an evaluation, with the prefix ``tuned_`` in their names."""
    return {
        f"tuned_{name}": value
        for name, value in row.items()
        if name.startswith(("test_", "validation_", "client_")) and isinstance(value, float)
    }
