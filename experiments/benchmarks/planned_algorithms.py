"""Compares the planned memory of every algorithm with what the compiler for a CPU plans.

    python experiments/benchmarks/planned_algorithms.py                     # what is missing
    python experiments/benchmarks/planned_algorithms.py --methods fedmcp --units none --again
    python experiments/benchmarks/planned_algorithms.py --planned           # nothing is compiled

The methods are those of ``experiments/algorithms/20news.toml``, on the shape of BERT-tiny with its
dropout, 64 x 128 tokens, one lane. A unit is whose data a mechanism of privacy protects: ``client``
is ``privacy.local``. Methods that such a mechanism refuses are left out. The figures are written to
``results/planned_algorithms.json`` and ``.md``. A round takes half a minute to compile on an idle
core, and up to two minutes with ``example``.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness

RESULTS = harness.RESULTS / "planned_algorithms.json"
METHODS = Path(__file__).parents[1] / "algorithms" / "20news.toml"
BERT_TINY = {"model_type": "bert", "vocab_size": 30522, "hidden_size": 128, "num_hidden_layers": 2}
BERT_TINY |= {"num_attention_heads": 2, "intermediate_size": 512, "max_position_embeddings": 512}
NOISE = {"clip": 1.0, "noise_multiplier": 1.0}
UNITS: dict[str, dict[str, Any]] = {
    "none": {},
    "example": {"name": "example", **NOISE},
    "client": {"name": "local", **NOISE},
}


def configs(
    shape: dict[str, Any] = BERT_TINY, size: int = 64, length: int = 128, dropout: float = 0.1
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (method, its config); the privacy is added to it."""
    from fedjax_peft.config import config

    for name, raw in config.methods(config.load(METHODS)).items():
        raw.pop("sweep", None)
        raw["model"] |= {"name": "tiny", "config": shape, "dropout": dropout}
        raw["data"]["max_length"], raw["batch_size"] = length, size
        raw["system"] = {}  # ranks that differ need all clients
        raw["peft"].pop("gradient_start", None)  # it needs the data
        if "clients" in raw["partition"]:
            raw["partition"]["clients"] = 1
        yield name, config.resolve(raw)


def cells(
    methods: list[str] | None, units: list[str], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Any]]:
    """Yields (key, plan) of the wanted cells; those that a mechanism refuses are left out."""
    from fedjax_peft.config import memory
    from fedjax_peft.support.errors import InputError

    for name, config in configs():
        for unit in units if methods is None or name in methods else ():
            if not wanted(f"{name} | {unit}"):
                continue
            try:
                found = memory.planned({**config, "privacy": UNITS[unit]})
            except InputError as error:
                print(f"{name}, {unit}: {error}")
                continue
            yield f"{name} | {unit}", found


def table(found: dict[str, dict[str, int]]) -> str:
    """Returns the table in Markdown."""
    rows = []
    for key, x in found.items():
        method, unit = key.split(" | ")
        sizes = [f"{x[name] / 1e6:.0f}" for name in ("planned", "compiler")]
        rows.append([method, unit, *sizes, f"{x['planned'] / x['compiler']:.2f}"])
    names = ["method", "privacy of", "planned, MB", "compiler, MB", "planned / compiler"]
    return harness.markdown(names, rows)


def main() -> None:
    """Compiles the missing cells, or plans again; writes the results."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--again", action="store_true", help="also compile cells that are known")
    parser.add_argument("--planned", action="store_true", help="only the arithmetic, again")
    a = parser.parse_args()
    from fedjax_peft.simulation.planning.memory_plan import compiled_bytes

    found = harness.known(RESULTS)

    def wanted(key: str) -> bool:
        return key in found if a.planned else a.again or key not in found

    for key, planned in cells(a.methods, a.units, wanted):
        known = found.get(key)
        compiler = known["compiler"] if known and not a.again else compiled_bytes(planned.parts, 1)
        found[key] = {"planned": planned.plan.total(1), "compiler": compiler}
        harness.write(RESULTS, found, table(found))
        print(key, found[key], flush=True)


if __name__ == "__main__":
    main()
