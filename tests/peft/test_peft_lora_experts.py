"""FedLEASE's layer equals the authors' forward pass and its gradients in torch, and other facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from flax import nnx
from internals import Dropout, LoRAExpertsLinear, attach_module, export
from refusals import refused
from shallow import simple_encoder  # noqa: F401

import fedjax_peft as fp

pytestmark = pytest.mark.usefixtures("simple_encoder")

IN, OUT, RANK, ROOM, SCALE = 5, 4, 2, 3, 1.5


class Small(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(IN, OUT, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def attached(**options):
    options = {"rank": RANK, "experts": ROOM, "targets": ["dense"], **options}
    return attach_module(Small(nnx.Rngs(0)), fp.peft.lora_experts(**options))


def with_experts(found, **options):
    """Returns a layer with random leaves, in which ``found`` experts are there."""
    module, rng = attached(alpha=SCALE * RANK, **options), np.random.default_rng(0)
    site = module.dense
    for i, lora in enumerate(site.loras()):
        drawn = jnp.float32(rng.normal(size=(IN, RANK)))
        lora.lora_a.set_value(drawn if i < found else jnp.zeros((IN, RANK)))
        lora.lora_b.set_value(jnp.float32(rng.normal(size=(RANK, OUT))))
    site.router.set_value(jnp.float32(rng.normal(size=site.router[...].shape)))
    return module


def authors(site, found, x, own):
    """Returns (output, leaves) of the authors' layer of ``found`` experts, ``own`` the client's.

    Their entries of the router are the experts in order, and then the client's own; their matrices
    are the transposes of ours.
    """

    def leaf(value):
        return torch.tensor(np.asarray(value).T, dtype=torch.float64, requires_grad=True)

    loras = site.loras()
    mine, *others = [(leaf(u.lora_a[...]), leaf(u.lora_b[...])) for u in loras[:found]]
    experts = [*others[:own], mine, *others[own:]]
    ours = np.asarray(site.router[...])
    foreign = ours[:, ROOM : ROOM + found - 1]
    columns = np.concatenate(
        [foreign[:, :own], ours[:, :1], foreign[:, own:], ours[:, 1:found]], axis=1
    )
    route = leaf(columns)
    x = torch.tensor(x, dtype=torch.float64)
    weights = torch.softmax(x @ route.T, dim=-1)
    top, places = torch.topk(weights, found, dim=-1)
    top = top / top.sum(dim=-1, keepdim=True)
    expert_of = torch.arange(2 * found - 1)
    expert_of[found:] = own
    result = x @ torch.tensor(np.asarray(site.base.kernel[...]), dtype=torch.float64)
    result = result + torch.tensor(np.asarray(site.base.bias[...]), dtype=torch.float64)
    for k in range(found):
        for i, (a, b) in enumerate(experts):
            taken = torch.where(expert_of[places[..., k]] == i, top[..., k], 0.0)
            result = result + taken[..., None] * (x @ a.T @ b.T) * SCALE
    return result, {"a": mine[0], "b": mine[1], "router": route}


@pytest.mark.parametrize(("found", "own"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_outputs_and_gradients_are_those_of_the_authors_layer(found, own):
    module = with_experts(found)
    site = module.dense
    assert isinstance(site, LoRAExpertsLinear)
    rng = np.random.default_rng(1)
    x, direction = rng.normal(size=(2, 6, IN)), rng.normal(size=(2, 6, OUT))
    result, leaves = authors(site, found, x, own)
    assert_close(module(jnp.float32(x)), result.detach().numpy(), rtol=0, atol=1e-5)
    (result * torch.tensor(direction)).sum().backward()
    trained = ("lora_a", "lora_b", "router")
    graph, params, rest = nnx.split(site, lambda path, _: path[-1] in trained, ...)

    def total(params):
        return jnp.sum(nnx.merge(graph, params, rest)(jnp.float32(x)) * jnp.float32(direction))

    by = jax.grad(total)(params)
    assert_close(by["own"]["lora_a"][...], leaves["a"].grad.numpy().T, rtol=0, atol=3e-5)
    assert_close(by["own"]["lora_b"][...], leaves["b"].grad.numpy().T, rtol=0, atol=3e-5)
    router = leaves["router"].grad.numpy().T
    ours = by["router"][...]
    copies = np.concatenate([router[:, own : own + 1], router[:, found:]], axis=1)
    foreign = np.delete(router[:, :found], own, axis=1)
    assert_close(ours[:, :found], copies, rtol=0, atol=3e-5)
    assert_close(ours[:, ROOM : ROOM + found - 1], foreign, rtol=0, atol=3e-5)
    np.testing.assert_array_equal(ours[:, found:ROOM], 0)
    np.testing.assert_array_equal(ours[:, ROOM + found - 1 :], 0)


def test_the_own_expert_is_always_among_the_chosen_and_their_number_differs():
    site = with_experts(ROOM).dense
    x = jnp.float32(np.random.default_rng(2).normal(size=(200, IN)))
    shares = np.asarray(site.shares(x))
    assert_close(shares.sum(axis=1), np.ones(200), rtol=0, atol=1e-6)
    assert (shares[:, 0] > 0).all()
    assert {1, 2, 3} == set((shares > 0).sum(axis=1).tolist())


def test_equal_entries_of_the_router_choose_the_first_places():
    site = with_experts(ROOM).dense
    site.router.set_value(jnp.zeros((IN, 2 * ROOM - 1)))
    shares = site.shares(jnp.ones((1, IN)))
    np.testing.assert_array_equal(shares, [[1, 0, 0]])


def test_all_experts_start_alike_and_the_router_is_uniform():
    module, x = attached(), jnp.ones((2, IN))
    np.testing.assert_array_equal(module(x), Small(nnx.Rngs(0))(x))
    site = module.dense
    for lora in site.loras():
        np.testing.assert_array_equal(lora.lora_a[...], site.own.lora_a[...])
        assert lora.lora_a[...].any()
        assert not lora.lora_b[...].any()
    limit = IN**-0.5
    assert 0 < np.abs(site.router[...]).min() <= np.abs(site.router[...]).max() <= limit


def test_experts_read_the_same_dropped_input_and_the_router_the_whole_one():
    module = with_experts(ROOM, dropout=0.5)
    site = module.dense
    assert isinstance(site.dropout, Dropout)
    x = jnp.float32(np.random.default_rng(1).normal(size=(6, IN)))
    dropped = site.dropout(x)
    assert (np.asarray(dropped) == 0).any()
    shares = np.asarray(site.shares(x))
    parts = [
        shares[:, i : i + 1] * np.asarray(u.update(dropped, jnp.float32))
        for i, u in enumerate(site.loras())
    ]
    assert_close(module(x) - site.base(x), sum(parts), rtol=0, atol=1e-5)


def test_it_cannot_be_merged_or_exported(tmp_path):
    model = fp.attach(fp.testing.tiny_model(classes=4), fp.peft.lora_experts(rank=2, experts=2))
    adapters = {n.rpartition(".")[2] for n, kind in model.kinds.items() if kind == "adapter"}
    assert adapters == {"lora_a", "lora_b", "router"}
    refused("LoRAExpertsLinear cannot be merged", fp.merge, model)
    for form in ("peft", "merged"):
        refused("lora_experts", export, model, model.trainable, tmp_path / form, format=form)
