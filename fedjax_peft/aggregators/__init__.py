"""How uploads combine: one file per aggregator."""

from fedjax_peft.aggregators.flexlora import flexlora
from fedjax_peft.aggregators.fra import fra
from fedjax_peft.aggregators.hetlora import hetlora
from fedjax_peft.aggregators.mean import mean

__all__ = ["flexlora", "fra", "hetlora", "mean"]
