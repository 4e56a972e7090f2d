"""The names of the metrics of tuned models (``Algorithm.tuning``)."""

from fedjax_peft.rows import Row

__all__ = ["tuned_figures"]


def tuned_figures(row: Row) -> Row:
    """Returns the scores of an evaluated row under the names of tuned models."""
    return {
        f"tuned_{name}": value
        for name, value in row.items()
        if name.startswith(("test_", "client_")) and isinstance(value, float)
    }
