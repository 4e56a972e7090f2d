"""Messages: every way in which an array travels, their sizes, and what a hostile sender may try."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from closeness import assert_close
from deployed import client_of
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.contracts import Wire
from fedjax_peft.deploy.wire import pack, table_of, unpack

RNG = np.random.default_rng(0)


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


BASE = {"a": drawn(40, 8), "b": [drawn(3), drawn(400)], "c": drawn(400), "whole": np.int32(7)}


def changed():
    sparse = BASE["b"][1].copy()
    sparse[[3, 50]] = 9, np.inf
    return {"a": BASE["a"], "b": [drawn(3), sparse], "c": sparse, "whole": np.int32(8)}


@pytest.mark.parametrize("base", [BASE, None], ids=["with base", "without"])
def test_a_tree_comes_back_to_the_bit(base):
    values = changed()
    got, table = unpack(pack(values, {"round": 3}, base), BASE, "x", base)
    assert table == {"round": 3}
    assert jax.tree.structure(got) == jax.tree.structure(BASE)
    jax.tree.map(np.testing.assert_array_equal, got, values)


def test_what_is_known_or_zero_costs_nothing():
    """Beside the header: a leaf that is equal to the base, to zero, or to another leaf."""
    leaf = drawn(1000)
    for values, base in (({"x": leaf}, {"x": leaf}), ({"x": np.zeros(1000, np.float32)}, None)):
        assert len(pack(values, {}, base)) < 200
    assert len(pack({"x": leaf, "y": leaf}, {})) < 4000 + 300
    assert len(pack({"x": np.where(np.arange(1000) < 10, leaf, 0)}, {})) < 80 + 300


@pytest.mark.parametrize("transform", [fp.transforms.int8(64), fp.transforms.quantize(8)])
def test_levels_travel_as_int8(transform):
    """Changes that a transform has rounded come back to rounding, in a quarter of the bytes."""
    base, change = {"x": drawn(50, 21)}, {"x": 0.01 * drawn(50, 21)}
    made = transform.client(change, transform.memory(change), (), jax.random.key(0)).update
    values = jax.tree.map(lambda x, y: np.asarray(x + y), base, made)
    sizes = transform.wire(change, {"x": Wire(1050, 32)})
    message = pack(values, {}, base, sizes)
    assert sizes["x"].nbytes < len(message) < sizes["x"].nbytes + 400
    got, _ = unpack(message, base, "x", base, sizes)
    assert_close(got["x"], values["x"], rtol=0, atol=1e-6)
    refused("is damaged", unpack, message, base, "x", base, {"x": Wire(1050, 8, 96)})
    dense = {"x": base["x"] + change["x"]}  # no levels: it travels whole, and exactly
    got, _ = unpack(pack(dense, {}, base, sizes), base, "x", base, sizes)
    np.testing.assert_array_equal(got["x"], dense["x"])


def test_another_form_is_refused_by_its_leaf():
    message = pack(changed(), {})
    for form, why in (
        ({**BASE, "c": drawn(401)}, r"float32\[400\] as 'c', and here it is float32\[401\]"),
        ({**BASE, "whole": np.float32(1)}, "as 'whole'"),
        ({**BASE, "d": drawn(1)}, "other leaves"),
        ({"a": BASE["a"]}, "other leaves"),
    ):
        refused(why, unpack, message, form, "client 3")
    refused("client 3 sent 9,000,000 bytes", unpack, b"x" * 9_000_000, BASE, "client 3")


def test_damaged_messages_are_refused_in_a_sentence():
    """Whatever byte changes, there is an error with the sender's name, or a tree of this form."""
    message, good = pack(changed(), {"round": 3}, BASE), 0
    for place in range(0, len(message), 7):
        bad = bytearray(message)
        bad[place] ^= 1 << (place % 8)
        try:
            got, _ = unpack(bytes(bad), BASE, "client 3", BASE)
        except fp.InputError as error:
            assert "client 3" in str(error)  # noqa: PT017 -- some bytes are numbers
        else:
            good += 1
            jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), got, BASE)
    assert good
    for bad in (b"", b"\xff" * 8, message[:-1], message[:20], b"\x00" * 100):
        refused("client 3", unpack, bad, BASE, "client 3", BASE)
        refused("client 3", table_of, bad, "client 3")


def test_a_client_reads_a_message_of_a_large_model(tmp_path):
    """Only what clients send is bounded before its form is known."""
    model = toy.lora_model(width=70_000)
    federation = toy.clients([4, 4])
    how = {"rounds": 1, "batch_size": 4}
    algorithm = fp.algorithms.fedavg(fp.optimizers.sgd(0.1))
    client = client_of(model, algorithm, federation, 1, tmp_path, **how)
    shared = {n: x for n, x in model.trainable.items() if n in toy.SHARED}
    sent = {
        "broadcast": shared,
        "template": shared,
        "frozen": {},
        "transform": (),
        "aggregator": (),
    }
    table = {"run": "0", "clients": 2, "sizes": None, "round": 1, "seed": 0}
    message = pack(sent, table)
    assert len(message) > 1 << 20
    answer = client.train(message, 0)
    assert table_of(answer, "client 1", shared)["finite"]
    got, _ = unpack(answer, shared, "client 1", shared)
    assert jnp.any(got["layer.lora_b"] != shared["layer.lora_b"])
