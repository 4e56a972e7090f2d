"""Example-level differential privacy: DP-SGD in every local step (Abadi et al. 2016, Algorithm 1).

    g_i  ←  gradient of the loss of example i           for each example of the batch, by itself
    g_i  ←  g_i · min(1, C / ‖g_i‖)                     ‖·‖ over all trained leaves together
    g    ←  (1/B) ( Σ_i g_i + N(0, (z C)² I) )          B: the batch size, the same in every step

The optimizer gets g. What the optimizer and the algorithm compute from g (uploads, control
variates, private leaves) is post-processing and keeps the guarantee. Each client adds the noise
itself, so nobody else has to be trusted, the server included.

**Gradients of single examples.** The loss is mapped over the examples (``jax.vmap``), each as a
batch of one, with its own key for dropout. A product with frozen weights stays one product for the
whole batch, because the weights have no axis of examples. An example counts as 0 if it is padding,
or if its gradient is not finite; it cannot make its client's upload infinite, which would drop the
client. A loss must be a mean over examples. One that couples the examples of a batch (FedMCP's CKA)
is refused. Terms that do not depend on examples (a proximal term, control variates, a penalty on
parameters) are added after clipping.

**What is counted.** Neighbours are data sets of which one has an empty example, which contributes
nothing, in the place of an example of the other (zero-out; ``replace_special``). The sum then
changes by at most C. The numbers of examples, clients and steps are public.

* With ``batch_sampling="poisson"`` a step is a Poisson-sampled Gaussian mechanism. An example of a
  client of n examples is in a step with probability B/n. A batch that is too large is cut. The
  probability of this event (``Federation.overflow_probability`` at most), times the number of
  steps, is subtracted from δ. The draw does not depend on the data, so that by the joint convexity
  of the hockey-stick divergence the event costs no more than its probability.
* With ``batch_sampling="shuffled"`` an example is in one batch of each pass. The passes are
  composed, and nothing is amplified: batches of a shuffled pass are not independent draws, and
  accounting for them as Poisson samples states a guarantee that is too good (Chua et al. 2024).
* An algorithm may take several gradients of the same batch (``Algorithm.gradients_per_step``). Each
  has its own noise, and they are composed: k of them are one with the noise multiplier z/√k.
* A client may be drawn in every round (``round_robin``: in each of its turns). The sampling of
  clients amplifies nothing, because the server sees who takes part.

The training metrics of the clients, such as their loss, are computed from the data without noise,
and are not part of the guarantee.

Checked against a Python loop over examples, and ``dp-accounting``'s ε.

Abadi et al. 2016, arXiv:1607.00133; Chua et al. 2024, arXiv:2403.17673.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.arguments import Count, NotNegative, Positive, Probability
from fedjax_peft.contracts.client import ClientContext, ClientUpdate, LossFn
from fedjax_peft.contracts.compatibility import check_compatible
from fedjax_peft.contracts.feature import Feature
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.privacy import Federation, Guarantee, Privacy
from fedjax_peft.contracts.types import Batch, Key, Metrics, PyTree
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.random import salted, stream
from fedjax_peft.privacy import guarantees, lifted, statements
from fedjax_peft.privacy.accounting import Accountant
from fedjax_peft.support.errors import InputError


@part
def example(
    clip: Positive,
    noise_multiplier: NotNegative,
    *,
    delta: Probability = 1e-5,
    microbatch: Count | None = None,
    accountant: Accountant = "rdp",
) -> Privacy:
    """Example-level privacy: every local step clips gradients of examples and adds noise (DP-SGD).

    Args:
      clip: C, the largest norm of an example's gradient, over all trained leaves together.
      noise_multiplier: z; the noise on the sum of a batch has the standard deviation z C.
      delta: δ of the guarantee.
      microbatch: examples whose gradients are computed and held at once; by default the whole
        batch. Results do not depend on it but for rounding.
      accountant: ``rdp`` or ``pld``.

    Raises:
      InputError: on use, an algorithm with a loss that couples examples, or one that uses data in
        another way than by gradients.
    """

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        what = (
            "example-level privacy with these options, because noise on gradients would not hide"
            " all that is used of an example"
        )
        check_compatible(algorithm, {Feature.EXAMPLE_PRIVACY: what})
        columns = dict(federation.columns)
        if "segment_ids" in columns and "prompt_ids" not in columns:  # several examples in a row
            raise InputError(
                "Example-level privacy protects single rows, and here one of them holds texts of"
                " several examples, and which ones depends on the others: the rows are packed, or"
                " loss = 'kto' compares answers of a client. Leave packing out, or take another"
                " loss."
            )
        own = private_gradient(clip, noise_multiplier, federation.batch_size, microbatch)

        def client(context: ClientContext) -> ClientUpdate:
            def step(state: PyTree, batch: Batch, key: Key) -> tuple[PyTree, Metrics]:
                numbers = itertools.count()

                def gradient(
                    loss: LossFn, params: PyTree, batch: Batch, key: Key
                ) -> tuple[PyTree, Metrics]:
                    # Two gradients of a step may have the same key, and must not share their noise.
                    private = salted(key, context.salt)
                    noise_key = stream(private, "example privacy", str(next(numbers)))
                    return own(loss, params, batch, key, noise_key)

                update = algorithm.client(context._replace(gradient=gradient))
                result = update.step(state, batch, key)
                _check_taken(algorithm, next(numbers))
                return result

            return algorithm.client(context)._replace(step=step)

        return algorithm._replace(client=client)

    def guarantee(federation: Federation, rounds: int) -> Guarantee:
        settings = (noise_multiplier, delta, federation, rounds)
        return Guarantee(guarantees.example_epsilon(*settings, accountant=accountant), delta)

    return Privacy("example", "example", protect, guarantee, statements.example_in_words)


def _check_taken(algorithm: Algorithm, taken: int) -> None:
    """Raises InputError for a local step that escapes the mechanism, or its accounting.

    Args:
      taken: gradients in the program of a step. With several, a step may take fewer (of branches,
        only one runs) or more (in a loop), so the number that an algorithm declares is believed.
    """
    if taken == 0:
        raise InputError(
            f"A local step of {algorithm.name!r} takes no gradient by context.gradient, so that"
            " example-level privacy protects nothing. Use it in place of jax.grad."
        )
    if taken > 1 == algorithm.gradients_per_step:
        raise InputError(
            f"A local step of {algorithm.name!r} takes {taken} gradients by context.gradient, and"
            " the ε of example-level privacy would count one. Set the algorithm's"
            f" gradients_per_step to the most that a step takes of its batch, such as {taken}."
        )


def private_gradient(
    clip: float | Array,
    noise_multiplier: float | Array,
    batch_size: int,
    microbatch: int | None = None,
) -> Callable[[LossFn, PyTree, Batch, Key, Key], tuple[PyTree, Metrics]]:
    """Returns (loss, params, batch, key, noise key) -> (noisy gradient, metrics).

    Args:
      clip: as for :func:`example`.
      batch_size: B, by which the sum is divided, whatever the number of examples in the batch.
      microbatch: as for :func:`example`.
    """

    def gradient(
        loss: LossFn, params: PyTree, batch: Batch, key: Key, noise_key: Key
    ) -> tuple[PyTree, Metrics]:
        total, metrics = clipped_sum(loss, params, batch, key, clip, microbatch)
        if maybe_nonzero(noise_multiplier):
            std = noise_multiplier * clip
            total = lifted.with_noise(total, lambda k, s: std * jax.random.normal(k, s), noise_key)
        return jax.tree.map(lambda x: x / batch_size, total), metrics

    return gradient


def clipped_sum(
    loss: LossFn,
    params: PyTree,
    batch: Batch,
    key: Key,
    clip: float | Array,
    microbatch: int | None = None,
) -> tuple[PyTree, Metrics]:
    """Returns (sum of the clipped gradients of the examples, metrics of the batch).

    Args:
      loss: as for ``ClientContext.gradient``.
      batch: likewise; ``mask`` says which examples count.
      key: likewise. Example ``i`` of the batch gets ``fold_in(key, i)``.
      microbatch: examples that are computed at once; None: all.
    """
    columns = {n: x for n, x in batch.items() if jnp.ndim(x)}
    scalars = {n: x for n, x in batch.items() if not jnp.ndim(x)}
    rows = len(batch["mask"])

    def one(index: Array, row: Batch) -> tuple[PyTree, Metrics]:
        alone = {n: x[None] for n, x in row.items()} | scalars
        own = jax.random.fold_in(key, index)
        return jax.grad(loss, has_aux=True)(params, alone, own)

    def some(index: Array) -> tuple[PyTree, Metrics]:
        chosen = {n: jnp.take(x, index, axis=0, mode="clip") for n, x in columns.items()}
        chosen["mask"] &= index < rows
        gradients, metrics = jax.vmap(one)(index, chosen)
        metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)
        return _clipped_and_added(gradients, chosen["mask"], clip), metrics

    size = rows if microbatch is None else min(microbatch, rows)
    places = jnp.arange(-(-rows // size) * size).reshape(-1, size)
    if len(places) == 1:
        return some(places[0])

    def add(total: PyTree, index: Array) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, some(index)), None

    shapes = jax.eval_shape(some, places[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, places)[0]


def _clipped_and_added(gradients: PyTree, mask: Array, clip: float | Array) -> PyTree:
    """Returns the sum of the clipped gradients; those outside of ``mask`` count as 0.

    Args:
      gradients: ``[examples, ...]``.
      mask: bool ``[examples]``.
    """
    leaves = jax.tree.leaves(gradients)
    squares = sum(jnp.sum(x**2, axis=tuple(range(1, x.ndim))) for x in leaves)
    # A square that overflows is not clipped but left out: it contributes nothing, which is less.
    counts = mask & jnp.isfinite(squares)
    norms = jnp.sqrt(jnp.where(counts & (squares > 0), squares, 1.0))
    factors = jnp.minimum(1.0, clip / norms)

    def added(x: Array) -> Array:
        wide = (slice(None), *(None,) * (x.ndim - 1))
        return jnp.sum(jnp.where(counts[wide], x * factors[wide], 0.0), axis=0)

    return jax.tree.map(added, gradients)
