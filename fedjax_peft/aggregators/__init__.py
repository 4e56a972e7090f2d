"""How uploads combine: one file per aggregator."""

from fedjax_peft.aggregators.bulyan import bulyan
from fedjax_peft.aggregators.centred_clipping import centred_clipping
from fedjax_peft.aggregators.flexlora import flexlora
from fedjax_peft.aggregators.flora_na import flora_na
from fedjax_peft.aggregators.fltrust import fltrust
from fedjax_peft.aggregators.fra import fra
from fedjax_peft.aggregators.geometric_median import geometric_median
from fedjax_peft.aggregators.hetlora import hetlora
from fedjax_peft.aggregators.ilora import ilora
from fedjax_peft.aggregators.krum import krum, multi_krum
from fedjax_peft.aggregators.lora_fair import lora_fair
from fedjax_peft.aggregators.mean import mean
from fedjax_peft.aggregators.median import median
from fedjax_peft.aggregators.norm_bounding import norm_bounding
from fedjax_peft.aggregators.raflora import raflora
from fedjax_peft.aggregators.trimmed_mean import trimmed_mean

__all__ = [
    "bulyan",
    "centred_clipping",
    "flexlora",
    "flora_na",
    "fltrust",
    "fra",
    "geometric_median",
    "hetlora",
    "ilora",
    "krum",
    "lora_fair",
    "mean",
    "median",
    "multi_krum",
    "norm_bounding",
    "raflora",
    "trimmed_mean",
]
