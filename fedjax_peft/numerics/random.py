"""The key schedule: every random number of a run follows from one seed, by name.

``seed -> named stream -> round -> client -> local step``. A key depends on its purpose, and never
on lane, slot, device or earlier work. So results do not change with the packing, and a resumed run
continues exactly.
"""

import operator
import zlib

import jax
import numpy as np
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError


def _tag(name: str) -> int:
    # crc32, not hash(): Python's string hash changes from process to process.
    return zlib.crc32(name.encode())


def _checked(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise InputError(f"The seed {show(seed)} must be from 0 to 2^63 - 1.")
    return operator.index(seed)  # NumPy's too


def _of_seed(seed: int) -> Key:
    # JAX reads the lower 32 bits of a seed and drops the others.
    lower, upper = seed % 2**32, seed // 2**32
    key = jax.random.key(lower)
    return jax.random.fold_in(key, upper) if upper else key


def stream(seed: int | Key, *names: str) -> Key:
    """Returns the key of a named stream, such as ``stream(0, "init", "encoder.layer.0.lora_a")``.

    Args:
      seed: the seed of the run, or a key from which the stream's key is derived.
    """
    key = seed if isinstance(seed, Array) else _of_seed(_checked(seed))
    for name in names:
        key = jax.random.fold_in(key, _tag(name))
    return key


def salted(key: Key, salt: Array | tuple[()]) -> Key:
    """Returns a key for the noise of one run among those of a seed.

    Args:
      salt: uint32 ``[n]``, by which their noise differs (``State.salt``); ``()``: the key itself.
    """
    for i in range(len(salt)):
        key = jax.random.fold_in(key, salt[i])
    return key


def client_key(key: Key, round_: Array | int, client: Array | int) -> Key:
    """Returns a client's key in a round. Its step keys are ``fold_in(client_key, local_step)``."""
    return jax.random.fold_in(jax.random.fold_in(key, round_), client)


def server_key(key: Key, round_: Array | int) -> Key:
    """Returns the server's key in a round, from the clients' key (``stream(seed, "clients")``)."""
    return jax.random.fold_in(stream(key, "server"), round_)


def transform_key(key: Key, round_: Array | int, client: Array | int) -> Key:
    """Returns a client's key for upload transforms in a round, from the clients' key.

    The transform at place ``i`` of a chain has ``fold_in(transform_key, i)``, so adding one to the
    end changes no random number of the others.
    """
    return client_key(stream(key, "transform"), round_, client)


def attack_key(key: Key, round_: Array | int, client: Array | int) -> Key:
    """Returns a client's key for tampering with its upload in a round, from the clients' key."""
    return client_key(stream(key, "attack"), round_, client)


def upload_key(key: Key, round_: Array | int, client: Array | int) -> Key:
    """Returns a client's key for ``Aggregator.randomise`` in a round, from the clients' key."""
    return client_key(stream(key, "upload"), round_, client)


def host_rng(seed: int, name: str, *indices: int) -> np.random.Generator:
    """Returns the host-side generator of a stream, such as ``host_rng(0, "cohort", round)``."""
    words = (_checked(seed), _tag(name), *map(int, indices))
    # Words of 32 bits are the same entropy as a list of numbers, and are read in a third of the
    # time: a plan has one generator for each client.
    entropy = np.array(words, np.uint32) if max(words) < 2**32 else list(words)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
