"""The sum of LoRA products: a matrix, or the factors of all uploads where these are smaller."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from internals import summation

import fedjax_peft as fp

SLOTS, RANK = 4, 2
# 4 x 2 x (in + out) numbers in the factors, against in x out.
SHAPES = {"factors": (30, 20), "matrix": (12, 10)}


def lift(upload, template, fixed):
    product = fp.contracts.Product(upload["a"], upload["b"])
    return {"plain": product, "own": fp.contracts.Weighted(upload["weight"], {"product": product})}


AGGREGATOR = fp.contracts.Aggregator("products", lift, finish=None)


@pytest.fixture(params=SHAPES)
def form(request):
    return request.param


def uploads(form):
    n_in, n_out = SHAPES[form]
    rng = np.random.default_rng(0)
    drawn = {
        "a": rng.normal(size=(SLOTS, n_in, RANK)),
        "b": rng.normal(size=(SLOTS, RANK, n_out)),
        "weight": rng.uniform(0.5, 2, SLOTS),
    }
    return {name: np.asarray(x, np.float32) for name, x in drawn.items()}


def total_of(sent, weights, parts):
    template = {name: x[0] for name, x in sent.items()}
    total = summation.empty(AGGREGATOR, template, {}, SLOTS)
    for part in parts:
        # A lane without anything to add has a slot out of range and the weight 0.
        slots = np.array([i if weights[i] else SLOTS for i in part], np.int32)
        some = {name: jnp.asarray(x[part]) for name, x in sent.items()}
        total = summation.add(AGGREGATOR, total, some, weights[part], slots, template, {})
    return total


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[2, 0], [3, 1]]])
def test_the_sum_is_the_matrix(form, parts):
    sent, weights = uploads(form), np.array([1.0, 3.0, 0.0, 0.5], np.float32)
    total = summation.summed(total_of(sent, weights, parts))
    products = np.einsum("kir,kro->kio", sent["a"], sent["b"], dtype=float)
    expected = np.tensordot(weights, products, axes=1)
    assert_close(total.value["plain"], expected, rtol=0, atol=2e-5)
    own = np.where(weights > 0, sent["weight"], 0)
    weighted = total.value["own"]
    assert_close(weighted.weight, own.sum(), rtol=1e-6)
    expected = np.tensordot(own, products, axes=1)
    assert_close(weighted.value["product"], expected, rtol=0, atol=2e-5)


def test_the_sum_takes_the_smaller_form(form):
    total = total_of(uploads(form), np.ones(SLOTS, np.float32), [[0, 1, 2, 3]])
    n_in, n_out = SHAPES[form]
    sizes = {"factors": SLOTS * RANK * (n_in + n_out), "matrix": n_in * n_out}
    assert sizes[form] == min(sizes.values())
    assert fp.tree.size(total.value["plain"]) == sizes[form]
    assert isinstance(total.value["plain"], fp.contracts.Product) == (form == "factors")


def test_the_order_of_the_uploads_changes_no_bit_of_factors():
    sent, weights = uploads("factors"), np.ones(SLOTS, np.float32)
    one, other = (
        summation.summed(total_of(sent, weights, parts)).value["plain"]
        for parts in ([[0, 1, 2, 3]], [[3], [1, 0], [2]])
    )
    np.testing.assert_array_equal(one, other)


def test_no_upload_is_a_matrix_of_zeros(form):
    template = {name: x[0] for name, x in uploads(form).items()}
    total = summation.summed(summation.empty(AGGREGATOR, template, {}, SLOTS))
    np.testing.assert_array_equal(total.value["plain"], np.zeros(SHAPES[form]))
    assert jax.tree.structure(total.value["own"].value) == jax.tree.structure({"product": 0})
