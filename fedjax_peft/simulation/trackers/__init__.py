"""Where the rows of a run go beside its directory: one file per service, each a ``Tracker``.

A function of yours with the arguments ``(row, run)`` is a tracker too.
"""

from fedjax_peft.simulation.trackers.csv import csv
from fedjax_peft.simulation.trackers.mlflow import mlflow
from fedjax_peft.simulation.trackers.tensorboard import tensorboard
from fedjax_peft.simulation.trackers.wandb import wandb

__all__ = ["csv", "mlflow", "tensorboard", "wandb"]
