"""Compares the forms of attention on this device: the whole scores, or blocks of examples.

Times one attention with its gradient, as in a training step, and gives the temporary memory of the
compiled program. The forms run alternately in one process; medians are reported.

    python experiments/benchmarks/attention_forms.py                 # CPU, about two minutes
    python experiments/benchmarks/attention_forms.py --lengths 128 --dropout 0.1 --causal
"""

import argparse
from functools import partial
from statistics import median

import harness
import jax
import jax.numpy as jnp

from fedjax_peft.models.attention import attention
from fedjax_peft.models.layers import Dropout

FORMS = ("whole", "blocks")


def program(form: str, a: argparse.Namespace, inputs: tuple) -> jax.stages.Compiled:
    """Returns the compiled attention with its gradient with respect to all three inputs."""
    length = inputs[0].shape[1]
    real = jnp.arange(length)[None] < jnp.linspace(length // 2, length, a.batch)[:, None]
    mask = real[:, None, None, :] if a.padding or a.causal else None
    if a.causal:
        mask = mask & jnp.tril(jnp.ones((length, length), bool))[None, None]

    def gradient(query, key, value, change):
        drop = Dropout(a.dropout)
        result, pull = jax.vjp(
            lambda q, k, v: attention(q, k, v, mask, drop, form=form), query, key, value
        )
        return result, pull(change)

    return jax.jit(gradient).lower(*inputs).compile()


def compare(length: int, a: argparse.Namespace) -> None:
    """Prints one row: seconds and memory of both forms."""
    shape = (a.batch, length, a.heads, a.width)
    inputs = tuple(jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4))
    programs = {form: program(form, a, inputs) for form in FORMS}
    runs = {form: partial(harness.timed, partial(x, *inputs)) for form, x in programs.items()}
    times = {form: median(x) for form, x in harness.turns(runs, a.repeats).items()}
    memory = {f: x.memory_analysis().temp_size_in_bytes / 1e6 for f, x in programs.items()}
    cells = [f"{1e3 * times[f]:9.1f} {memory[f]:8.1f}" for f in FORMS]
    print(f"{length:6}  {'  '.join(cells)}  {times['whole'] / times['blocks']:5.2f}")


def main() -> None:
    """Measures and prints a table."""
    parser = harness.arguments(__doc__, batch=16, heads=12, width=64, repeats=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 197, 256, 512])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--padding", action="store_true", help="mask the padding of some examples")
    parser.add_argument("--causal", action="store_true", help="the same, and later tokens")
    a = parser.parse_args()
    print(f"batch {a.batch}, {a.heads} heads of {a.width}, dropout {a.dropout}")
    print("                whole              blocks     whole/")
    print("length         ms       MB         ms       MB  blocks")
    for length in a.lengths:
        compare(length, a)


if __name__ == "__main__":
    main()
