"""When clients are available: one file per model, each a pure function (``Availability``)."""

from fedjax_peft.availability.diurnal import diurnal
from fedjax_peft.availability.markov import markov
from fedjax_peft.availability.trace import trace

__all__ = ["diurnal", "markov", "trace"]
