"""Counts what the devices of a mesh send each other in a round, and what each of them holds.

    python experiments/benchmarks/weak_scaling.py --shape minilm

The devices are virtual: parts of one processor. Their times would say nothing about accelerators,
so nothing is run. The round is compiled for every mesh, and the collectives of the compiled program
are counted, with the bytes that a device sends. The clients grow with the devices (weak scaling).

Loops are counted by hand: the program has one loop, over the time steps of the plan. ``a step`` is
its body, ``a client`` is the two branches of the body in which clients begin and end, and ``a
round`` is what comes before and after the loop. The bytes are those of ring algorithms: of ``n``
devices, each sends ``(n - 1) / n`` of a gathered array, and twice that of a summed one.
"""

import math
import os
import re
from collections import Counter
from typing import Any, NamedTuple

import harness
from accelerators import MINILM

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
             "intermediate_size": 256, "vocab_size": 1024},
    "minilm": MINILM,
    "base": {},
}  # fmt: skip
MESHES = [
    *((lanes, 1, "tensor") for lanes in (2, 4, 8)),
    *((8 // model, model, form) for form in ("tensor", "gather") for model in (2, 4, 8)),
]
"""(lanes, model, model_sharding)."""
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2, "s64": 8}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.-]+)"
)


class Collective(NamedTuple):
    """One collective of a compiled program."""

    kind: str
    place: str
    """``step``, ``client`` or ``round``."""
    sent: float
    """Bytes that a device sends."""


def collectives(program: str) -> list[Collective]:
    """Returns the collectives of a compiled program (the text of its HLO)."""
    blocks, entry = _computations(program)
    found: list[Collective] = []
    waiting = [(entry, "round")]
    while waiting:
        name, place = waiting.pop()
        for line in blocks[name]:
            kind = next((k for k in KINDS if re.search(rf" {k}(-start)?\(", line)), None)
            if kind is not None:
                found.append(Collective(kind, place, _sent(kind, line)))
                continue
            inside = place
            if " while(" in line and place == "round":
                inside = "step"
            elif " conditional(" in line and place == "step":
                inside = "client"
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = _CALLED.findall(line)
            names += [] if branches is None else re.findall(r"%([\w.-]+)", branches[1])
            waiting += [(called, inside) for called in names]
    return found


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of every computation by name, and the name of the entry."""
    blocks: dict[str, list[str]] = {}
    entry = name = ""
    for line in program.splitlines():
        head = re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head[2]
            blocks[name] = []
            entry = name if head[1] else entry
        elif name:
            blocks[name].append(line)
    return blocks, entry


def _sent(kind: str, line: str) -> float:
    """Returns the bytes that a device sends in a collective, by a ring algorithm."""
    result = re.split(rf" {kind}(?:-start)?\(", line)[0]
    size = sum(
        BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in _SHAPE.findall(result)
    )
    if kind == "collective-permute":
        return size
    n = _group(line)
    share = (n - 1) / n
    return {"all-reduce": 2 * share, "reduce-scatter": n - 1}.get(kind, share) * size


def _group(line: str) -> int:
    """Returns the number of devices that take part in a collective with each other."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", line)
    assert mesh is not None, line
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))


def compiled(shape: str, lanes: int, model_devices: int, form: Any) -> tuple[str, int, int, int]:
    """Returns the program of a round, its steps, and the bytes on a device.

    These are those of the frozen leaves, and those of the clients' state.
    """
    import jax
    import numpy as np
    import optax

    import fedjax_peft as fp
    from fedjax_peft.data import Clients
    from fedjax_peft.models import heads, registry

    config = {"model_type": "bert", **SHAPES[shape]}
    devices, length, batch = lanes * model_devices, 64, 16
    model = fp.attach(registry.random_model(config, head=heads.classification(4)), fp.peft.lora(8))
    each, count = 2 * batch, 16 * devices
    data = harness.random_texts(each * count, length, classes=4, words=1000)
    clients = Clients(data, tuple(np.arange(each * count, dtype=np.int32).reshape(count, each)))
    session = fp.session(
        model,
        fp.algorithms.ditto(optax.adamw(1e-3)),
        clients,
        clients_per_round=2 * devices,
        batch_size=batch,
        placement=fp.Placement(
            lanes=devices,
            devices=devices,
            model_parallel=model_devices,
            model_sharding=form,
            length_buckets=0,
        ),
    )
    state, plan = session.init(0), session.plan(1, 0)
    program = session.program(plan, 0)
    program.compile(state, plan)

    def on_a_device(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    text = program._compiled.as_text()
    return text, int(plan.steps), on_a_device(session.setup.frozen), on_a_device(state.client_state)


def row(shape: str, lanes: int, model_devices: int, form: str) -> str:
    """Returns a row of the table."""
    text, steps, frozen, clients = compiled(shape, lanes, model_devices, form)
    found = collectives(text)
    cells = [f"{lanes} x {model_devices}", form if model_devices > 1 else "–"]
    cells += [f"{frozen / 1e6:.1f}", f"{clients / 1e6:.1f}"]
    total = 0.0
    # Every lane trains two clients, one after the other, so clients begin and end twice.
    for place, times in (("step", steps), ("client", 2), ("round", 1)):
        here = [c for c in found if c.place == place]
        counts = Counter(c.kind for c in here)
        sent = sum(c.sent for c in here)
        total += times * sent
        said = ", ".join(f"{counts[k]} {k}" for k in KINDS if counts[k])
        cells += [f"{said or 'none'}: {sent / 1e6:.2f}"]
    return harness.line([*cells, f"{total / 1e6:.1f}"])


def main() -> None:
    """Prints a table in Markdown, a row for every mesh."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    options = parser.parse_args()
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    names = ["mesh, lanes x model", "form", "frozen MB", "clients' state MB", "a step: MB sent"]
    names += ["a client's begin and end: MB sent", "before and after the loop: MB sent"]
    print(harness.heading([*names, "a round: MB"]))
    for mesh in MESHES:
        print(row(options.shape, *mesh), flush=True)


if __name__ == "__main__":
    main()
