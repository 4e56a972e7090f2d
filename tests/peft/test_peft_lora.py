"""LoRA: formula, initial values, trained leaves and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import ROUNDOFF, approx, assert_close
from flax import nnx
from internals import AdapterParam, FusedLinear, LoRALinear, attach_module
from tiny import logits, tiny

import fedjax_peft as fp
from fedjax_peft.peft.lora_starts import minor_factors, orthonormal_factors, principal_factors

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)


def layer(scale=1.5, dropout=0.0, rank=3):
    base = nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    a, b = jax.random.normal(KEY, (8, rank)), jax.random.normal(KEY, (rank, 6))
    return LoRALinear(base, a, b, scale, dropout), a, b


# --------------------------------------------------------------------------------------- formula


def test_output_is_the_formula():
    module, a, b = layer(scale=1.5)
    x = jax.random.normal(KEY, (2, 5, 8))
    expected = np.asarray(module.base(x)) + 1.5 * np.asarray(x) @ np.asarray(a) @ np.asarray(b)
    assert_close(module(x), expected, rtol=1e-5, atol=1e-5)


def test_directions_with_scale_zero_have_no_effect():
    # So a client may own fewer directions than another in one stacked pytree.
    module, a, b = layer(scale=2.0)
    module.lora_scale.set_value(jnp.array([2.0, 2.0, 0.0]))
    x = jax.random.normal(KEY, (5, 8))
    assert_close(module(x), module.base(x) + 2 * (x @ a[:, :2]) @ b[:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("alpha", "rslora", "s"), [(None, False, 1), (8, False, 2), (8, True, 4)])
def test_trained_leaves_and_their_scale(alpha, rslora, s):
    model = fp.attach(tiny("roberta"), fp.lora(4, alpha=alpha, rslora=rslora))
    paths = [f"roberta.encoder.layer.{i}.attention.self" for i in (0, 1)]
    sites = [f"{path}.{name}" for path in paths for name in ("query", "value")]
    found = {name: kind for name, kind in model.kinds.items() if kind != "head"}
    expected = {f"{site}.lora_{x}": "adapter" for site in sites for x in "ab"}
    assert found == expected | {f"{site}.lora_scale": "fixed" for site in sites}
    scales = [model.trainable[f"{site}.lora_scale"] for site in sites]
    np.testing.assert_array_equal(np.stack(scales), np.full((4, 4), s, np.float32))
    factors = [model.trainable[f"{site}.lora_a"] for site in sites]
    assert len(np.unique(np.stack(factors), axis=0)) == 4  # each from its path


def test_dropout_acts_on_the_low_rank_branch_only():
    module, a, b = layer(scale=1.0, dropout=0.5)
    module.base.kernel.set_value(jnp.eye(8, 6))
    x = jnp.ones((200, 8))
    branch = np.asarray(module(x) - module.base(x))
    whole = np.asarray(x @ a @ b)
    assert np.std(branch, axis=0).min() > 0.1
    # The branch sees x with elements dropped: solving for them gives 0 or 1 / keep rate.
    dropped = np.asarray(module.dropout(x))
    # Terms up to 64 in size, 24 of them in a sum.
    assert_close(branch, dropped @ np.asarray(a @ b), rtol=0, atol=8 * 64 * ROUNDOFF)
    assert set(np.unique(dropped)) == {0.0, 2.0}
    module.eval()
    assert_close(module(x) - module.base(x), whole, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------- starts


def start(init, shape, rank, seed=0):
    module = nnx.Dict(dense=nnx.Linear(*shape, rngs=nnx.Rngs(0)))
    attach_module(module, fp.lora(rank, init=init, targets=["dense"]), seed=seed)
    return np.asarray(module.dense.lora_a[...]), np.asarray(module.dense.lora_b[...])


def test_kaiming_start_is_uniform_up_to_its_bound():
    assert not np.array_equal(start("kaiming", (8, 8), 4)[0], start("kaiming", (8, 8), 4, 1)[0])
    a, b = start("kaiming", (64, 128), 32)
    bound = 1 / np.sqrt(64)
    assert 0.99 * bound < np.abs(a).max() <= bound
    assert abs(a.std() / (bound / np.sqrt(3)) - 1) < 0.05
    assert not b.any()


def test_gaussian_start_has_deviation_one_over_rank():
    a, b = start("gaussian", (64, 128), 32)
    assert abs(a.std() * 32 - 1) < 0.05
    assert abs(a.mean() * 32) < 0.1
    assert not b.any()


@pytest.mark.parametrize(
    ("init", "options"),
    [("svd", {"alpha": 10.0, "rslora": True}), ("milora", {"alpha": 3.0}), ("qr", {"alpha": 10.0})],
)
def test_a_start_from_the_weights_changes_no_logit(init, options):
    plain = tiny()
    model = fp.attach(plain, fp.lora(4, init=init, **options))
    assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    for name, kernel in plain.frozen.items():
        if name.endswith(("query.kernel", "value.kernel")):
            path = name.removesuffix(".kernel")
            a, b, s = (model.trainable[f"{path}.lora_{n}"] for n in ("a", "b", "scale"))
            residual = model.frozen[f"{path}.base.kernel"]
            assert_close(residual + s[0] * a @ b, kernel, rtol=0, atol=1e-5)
            share = np.linalg.norm(residual) / np.linalg.norm(kernel)
            assert share > 0.98 if init == "milora" else share < 0.95


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_svd_start_holds_the_largest_directions_with_canonical_signs(shape):
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    factors, residuals = principal_factors({"k": jnp.asarray(kernel)}, {"k": 3}, {"k": 2.0})
    a, b = map(np.asarray, factors["k"])
    u, s, vt = np.linalg.svd(kernel.astype(np.float64), full_matrices=False)
    best = u[:, :3] * s[:3] @ vt[:3]
    assert_close(2.0 * a @ b, best, rtol=0, atol=1e-5)
    assert_close(residuals["k"], kernel - best, rtol=0, atol=1e-5)
    # The singular values are split evenly, and the largest entry of each column of A is positive.
    assert_close(np.linalg.norm(a, axis=0), np.sqrt(s[:3] / 2), rtol=1e-5)
    assert_close(np.linalg.norm(b, axis=1), np.sqrt(s[:3] / 2), rtol=1e-5)
    assert (np.take_along_axis(a, np.abs(a).argmax(axis=0)[None], axis=0) > 0).all()


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_qr_start_is_the_beginning_of_a_decomposition_of_the_transpose(shape):
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    factors, residuals = orthonormal_factors({"k": jnp.asarray(kernel)}, {"k": 3}, {"k": 2.0})
    a, b = map(np.asarray, factors["k"])
    q, r = np.linalg.qr(kernel.astype(np.float64).T)
    sign = np.sign(np.diagonal(r)[:3])
    assert_close(b, sign[:, None] * q.T[:3], rtol=0, atol=1e-5)
    assert_close(2.0 * a, (sign[:, None] * r[:3]).T, rtol=0, atol=1e-5)
    assert_close(residuals["k"], kernel - (q[:, :3] @ r[:3]).T, rtol=0, atol=1e-5)
    # The factors hold the first three input features; R has no entries below its diagonal.
    assert_close(residuals["k"][:3], 0, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.triu(a, 1), 0)


def test_qr_start_is_olora_of_peft():
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("peft")
    kernel = np.random.default_rng(1).normal(size=(12, 7)).astype(np.float32)
    factors, residuals = orthonormal_factors({"k": jnp.asarray(kernel)}, {"k": 3}, {"k": 1.0})
    base = torch.nn.Sequential(torch.nn.Linear(12, 7, bias=False))
    base[0].weight.data.copy_(torch.tensor(kernel.T))
    options = {"r": 3, "lora_alpha": 3, "target_modules": ["0"], "init_lora_weights": "olora"}
    layer = theirs.get_peft_model(base, theirs.LoraConfig(**options)).base_model.model[0]
    a, b = (layer.lora_A.default.weight, layer.lora_B.default.weight)
    sign = np.sign(np.diagonal(a.detach().numpy()))  # peft takes the signs that it gets
    assert_close(factors["k"][0], a.detach().numpy().T * sign, atol=1e-5)
    assert_close(factors["k"][1].T, b.detach().numpy() * sign, atol=1e-5)
    rest = layer.base_layer.weight.detach().numpy().T
    assert_close(residuals["k"], rest, rtol=0, atol=1e-5)


def test_qr_start_of_a_matrix_of_lower_rank_has_orthonormal_rows():
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(12, 2)) @ rng.normal(size=(2, 7)), jnp.float32)
    factors, residuals = orthonormal_factors({"k": kernel}, {"k": 4}, {"k": 2.0})
    a, b = factors["k"]
    assert_close(residuals["k"] + 2.0 * a @ b, kernel, rtol=0, atol=1e-5)
    assert_close(b @ b.T, np.eye(4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
def test_milora_start_holds_the_smallest_directions(shape):
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    factors, residuals = minor_factors({"k": jnp.asarray(kernel)}, {"k": 3}, {"k": 2.0})
    a, b = map(np.asarray, factors["k"])
    u, s, vt = np.linalg.svd(kernel.astype(np.float64), full_matrices=False)
    assert_close(2 * a @ b, u[:, -3:] * s[-3:] @ vt[-3:], rtol=0, atol=1e-5)
    assert_close(residuals["k"], u[:, :-3] * s[:-3] @ vt[:-3], rtol=0, atol=1e-5)
    for columns in (a, b.T):  # each has the root of a singular value, so that both train alike
        assert_close(columns.T @ columns, np.diag(s[-3:] / 2), rtol=0, atol=1e-5)
    assert (a[np.abs(a).argmax(0), range(3)] > 0).all()


def test_milora_start_of_a_matrix_of_lower_rank_can_train():
    kernel = np.zeros((6, 5), np.float32)
    kernel[0, 0] = 1
    factors, residuals = minor_factors({"k": jnp.asarray(kernel)}, {"k": 3}, {"k": 1.0})
    a, b = map(np.asarray, factors["k"])
    assert not b.any()
    assert_close(np.linalg.norm(a, axis=0), 3**-0.5, rtol=1e-5)
    np.testing.assert_array_equal(residuals["k"], kernel)


def test_pissa_is_another_name_of_the_svd_start():
    first, second = (fp.attach(tiny(), fp.lora(4, init=init)) for init in ("svd", "pissa"))
    for name in first.trainable:
        np.testing.assert_array_equal(first.trainable[name], second.trainable[name])
    for name in first.frozen:
        np.testing.assert_array_equal(first.frozen[name], second.frozen[name])


@pytest.mark.parametrize("rank", [0, 2])
def test_svd_start_of_a_matrix_of_lower_rank_can_train_in_all_directions(rank):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(12, rank)) @ rng.normal(size=(rank, 7)), jnp.float32)
    factors, residuals = principal_factors({"k": kernel}, {"k": 4}, {"k": 2.0})
    a, b = factors["k"]
    assert_close(residuals["k"] + 2.0 * a @ b, kernel, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(b[rank:], 0)
    assert_close(np.linalg.norm(a[:, rank:], axis=0), 1 / np.sqrt(3), rtol=1e-5)
    x, y = (jnp.asarray(rng.normal(size=(5, n)), jnp.float32) for n in (12, 7))

    def loss(a, b):
        return jnp.mean((x @ (residuals["k"] + 2.0 * a @ b) - y) ** 2)

    of_a, of_b = jax.grad(loss, argnums=(0, 1))(a, b)
    moves = np.abs(of_a).max(axis=0) + np.abs(of_b).max(axis=1)
    assert moves.min() > 1e-3, "every direction has a gradient"


# --------------------------------------------------------------------------------------- targets


def sites(model):
    return sorted(n.removesuffix(".lora_a") for n in model.trainable if n.endswith("lora_a"))


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (None, 4),
        (["key"], 2),
        (["query", "output.dense"], 6),
        (["bert.encoder.layer.1.output.dense"], 1),
        (r"bert\.encoder\.layer\.0\..*\.(query|key)", 2),
        (".*dense", 6),
    ],
)
def test_targets_are_read_as_in_peft(targets, count):
    # ``dense`` would be the pooler's too, but here it is in the head, which is trained whole.
    assert len(sites(fp.attach(tiny(), fp.lora(4, targets=targets)))) == count


# -------------------------------------------------------------------------- a user's own module


class MLP(nnx.Module):
    """A module of a user, with flax's dropout."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(6, 12, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.out = nnx.Linear(12, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(jax.nn.relu(self.hidden(x))))


def forward(module, batch):
    y = module(batch["x"])
    return fp.contracts.Outputs(y, y[:, None])


def test_own_module_is_adapted_and_trained():
    model = fp.bind(MLP(nnx.Rngs(0)), head=("out",), forward=forward)
    model = fp.attach(model, fp.lora(2, targets=["hidden"]))
    assert model.kinds == {
        "hidden.lora_a": "adapter",
        "hidden.lora_b": "adapter",
        "hidden.lora_scale": "fixed",
        "out.bias": "head",
        "out.kernel": "head",
    }
    assert model.frozen.keys() == {"hidden.base.kernel", "hidden.base.bias"}
    x = jax.random.normal(KEY, (64, 6))
    adapted = {n: v for n, v in model.trainable.items() if model.kinds[n] != "fixed"}
    fixed = {n: v for n, v in model.trainable.items() if model.kinds[n] == "fixed"}

    @jax.jit
    @jax.value_and_grad
    def loss(params, key):
        outputs = model.apply(model.frozen, {**fixed, **params}, {"x": x}, key, True)
        return jnp.mean(outputs.logits**2)

    losses = []
    for _ in range(3):
        value, gradients = loss(adapted, KEY)  # flax's dropout follows the key
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, adapted, gradients)
        losses.append(float(value))
    assert losses[2] < losses[1] < losses[0]
    assert all(jnp.any(g != 0) for g in gradients.values())
    assert loss(adapted, KEY)[0] != loss(adapted, jax.random.key(4))[0]


# ------------------------------------------------------------------------------ patterns and parts


def test_patterns_give_layers_ranks_and_scales_of_their_own():
    method = fp.lora(
        4,
        alpha=8.0,
        targets=["query", "value"],
        rank_pattern={"layer.0.attention.self.query": 2, "value": 3},
        alpha_pattern={r"layer\.1\..*query": 2.0},
    )
    leaves = fp.attach(tiny(), method).trainable
    got = {
        (layer, name): (leaves[f"{site}.lora_a"].shape[1], float(leaves[f"{site}.lora_scale"][0]))
        for layer in (0, 1)
        for name in ("query", "value")
        for site in [f"bert.encoder.layer.{layer}.attention.self.{name}"]
    }
    assert got == {
        (0, "query"): (2, 4.0),
        (0, "value"): (3, approx(8 / 3)),
        (1, "query"): (4, 0.5),
        (1, "value"): (3, approx(8 / 3)),
    }


def fused():
    return nnx.Dict(c_attn=FusedLinear(6, 12, ("q", "k", "v"), jnp.float32))


@pytest.mark.parametrize("init", ["kaiming", "svd", "qr"])
def test_parts_of_a_fused_projection(init):
    plain = fused()
    method = fp.lora(2, alpha=3.0, targets=["c_attn"], parts=["q", "v"], init=init)
    site = attach_module(fused(), method).c_attn
    x = jax.random.normal(KEY, (3, 5, 6))
    assert_close(site(x), plain.c_attn(x), rtol=0, atol=1e-5)
    names = {".".join(map(str, p)) for p, _ in nnx.to_flat_state(nnx.state(site, AdapterParam))}
    assert names == {"q.lora_a", "q.lora_b", "v.lora_a", "v.lora_b"}
    before = site(x)
    for name in ("q", "v"):
        part = getattr(site, name)
        part.lora_b.set_value(part.lora_b[...] + jax.random.normal(KEY, part.lora_b.shape))
    after = site(x)
    moved = jnp.abs(after - before).max(axis=(0, 1)).reshape(3, 4)
    assert (moved[jnp.array([0, 2])] > 0.01).all()
    assert (moved[1] == 0).all(), "the key has no update"
    assert_close(site.merged()(x), after, rtol=0, atol=1e-5)
    with pytest.raises(fp.InputError, match="no part 'query'"):
        attach_module(fused(), fp.lora(2, targets=["c_attn"], parts=["query"]))


def test_layers_are_counted_from_both_ends():
    bare = tiny()
    adapted = fp.attach(bare, fp.lora(2, layers=[-1]))
    paths = {name.rpartition(".")[0] for name in adapted.kinds if "lora" in name}
    assert paths == {f"bert.encoder.layer.1.attention.self.{x}" for x in ("query", "value")}
    assert fp.lora(2, layers=[1]).options["layers"] == (1,)
    assert "layers" not in fp.lora(2).options
