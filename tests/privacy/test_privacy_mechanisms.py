"""Adaptive clipping, Laplace noise, and the noise of the FRA-LoRA paper."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close, roughly
from internals import pairs
from protection import (
    BASES,
    CLIENTS,
    FEDAVG,
    FIXED,
    N_IN,
    N_OUT,
    QN,
    RANK,
    changes,
    draw,
    empty_rounds,
    federation,
    in_space,
    private,
    run,
    showing,
)
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import aggregators
from fedjax_peft.privacy import lifted as lifting

pytestmark = pytest.mark.slow


# ---------------------------------------------------------------------------------------- adaptive


def test_the_clip_norm_follows_the_quantile_as_in_the_paper():
    """Algorithm 1 of Andrew et al. 2021 in NumPy, without noise, over three rounds."""
    uploads, template = draw(0)
    norms = np.sort(np.linalg.norm(changes("fra", uploads, template), axis=1))
    clip, rate, quantile = (norms[1] + norms[2]) / 2, 0.3, 0.75
    privacy = fp.privacy.adaptive(clip, 0.0, quantile=quantile, clip_rate=rate)
    aggregator, state = private(privacy, aggregators.fra()), None
    for _ in range(3):
        bound = aggregator if state is None else aggregator.bound(state)
        got = run(bound, uploads, template, state=state)
        share = np.sum((norms <= clip) - 0.5) / QN + 0.5
        assert_close(got.metrics["privacy_clip"], clip, rtol=1e-5)
        assert_close(got.metrics["privacy_unclipped"], share, rtol=1e-5)
        assert_close(got.metrics["privacy_clip_share"], np.mean(norms > clip))
        clip *= np.exp(-rate * (share - quantile))
        assert_close(got.state["clip"], clip, rtol=1e-5)
        state = got.state


def test_the_uploads_are_clipped_to_the_norm_of_the_state():
    uploads, template = draw(1)
    aggregator = private(fp.privacy.adaptive(1.0, 0.0), showing(aggregators.mean()))
    state = {**aggregator.init(template), "clip": jnp.float32(2.5)}
    bound = aggregator.bound(state)
    flat = changes("mean", uploads, template)
    short = flat * np.minimum(1, 2.5 / np.linalg.norm(flat, axis=1))[:, None]
    update = run(bound, uploads, template, state=state).update["changes"]
    got = np.concatenate([update[n].ravel() for n in sorted(update)])
    assert_close(got, short.sum(axis=0) / QN, atol=1e-5)


def test_the_noise_is_split_between_uploads_and_share():
    """With z = 0.8 and σ_b = 1.5: z_Δ = (z⁻² - (2σ_b)⁻²)^(-½)."""
    z, count_noise, clip = 0.8, 1.5, 3.0
    _, template = draw(2)
    privacy = fp.privacy.adaptive(clip, z, count_noise=count_noise)
    aggregator = private(privacy, showing(aggregators.mean()))
    updates, metrics = empty_rounds(aggregator, template)
    shares = empty_rounds(
        aggregator, template, 20_000, lambda done: done.metrics["privacy_unclipped"]
    )
    z_uploads = (z**-2 - (2 * count_noise) ** -2) ** -0.5
    flat = np.concatenate([x.ravel() for x in jax.tree.leaves(updates)])
    assert_close(metrics["privacy_noise_std"], z_uploads * clip / QN, rtol=1e-5)
    assert_close(flat.std(), z_uploads * clip / QN, rtol=0.01)
    assert_close(shares.std(), count_noise / QN, rtol=0.02)
    assert_close(shares.mean(), 0.5, atol=0.01)


@pytest.mark.parametrize("base", BASES)
def test_one_client_moves_upload_and_share_by_no_more_than_the_noise_multiplier_says(base):
    """Against a client that is missing and one that sends zeros: (Δ/σ)² of both sums, together."""
    z, clip, count_noise = 1.0, 0.5, 1.0
    uploads, template = draw(4)  # far above the clip norm
    aggregator = private(fp.privacy.adaptive(clip, z, count_noise=count_noise), BASES[base]())
    zeros = {n: np.stack([x] * CLIENTS) for n, x in template.items()}

    @jax.jit
    def total(sent, weight):
        lifted = jax.vmap(lambda one: aggregator.lift(one, template, FIXED))(sent)
        dense = jax.vmap(lifting.dense)(lifted["lifted"]["sum"])
        own = jnp.r_[weight, jnp.ones(CLIENTS - 1)]
        return jax.tree.map(lambda x: jnp.tensordot(own, x, axes=1), (dense, lifted["below"]))

    one_of_zeros = {n: np.concatenate([zeros[n][:1], x[1:]]) for n, x in uploads.items()}
    z_uploads = (z**-2 - (2 * count_noise) ** -2) ** -0.5
    data, absent = total(uploads, 1.0), total(uploads, 0.0)
    for other in (absent, total(one_of_zeros, 1.0)):
        change, count = jax.tree.map(lambda x, y: np.asarray(x - y, np.float64), data, other)
        length = np.linalg.norm(np.concatenate([x.ravel() for x in jax.tree.leaves(change)]))
        loss = (length / (z_uploads * clip)) ** 2 + (count / count_noise) ** 2
        assert 0.9 < loss <= (1 + 1e-5) / z**2


# ----------------------------------------------------------------------------------------- Laplace


@pytest.mark.parametrize("name", BASES)
def test_laplace_clips_the_l1_norm_of_what_is_summed(name):
    uploads, template = draw(3)
    flat = changes(name, uploads, template)
    norms = np.abs(flat).sum(axis=1)
    clip = float(np.sort(norms)[1:3].mean())
    aggregator = private(fp.privacy.laplace(clip, 0.0), showing(BASES[name]()))
    got = run(aggregator, uploads, template)
    short = (flat * np.minimum(1, clip / norms)[:, None]).sum(axis=0) / QN
    start = in_space(name, template)
    if name == "mean":
        start = {n: 0 * x for n, x in start.items()}
    space = {n.split("'")[-2]: x for n, x in flattened(got.update).items()}
    result = np.concatenate([(space[n] - start[n]).ravel() for n in sorted(start)])
    assert_close(result, short, atol=1e-4)
    assert_close(got.metrics["privacy_median_norm"], np.median(norms), rtol=1e-5)


def flattened(update):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(update)}


def test_laplace_noise_has_its_scale_and_its_shape():
    z, clip = 0.6, 2.0
    _, template = draw(4)
    aggregator = private(fp.privacy.laplace(clip, z), showing(aggregators.mean()))
    updates, metrics = empty_rounds(aggregator, template)
    flat = np.concatenate([x.ravel() for x in jax.tree.leaves(updates)])
    assert_close(metrics["privacy_noise_std"], math.sqrt(2) * z * clip / QN, rtol=1e-6)
    assert np.abs(flat).mean() == roughly(z * clip / QN, rel=0.01)
    assert np.mean(flat**4) / np.mean(flat**2) ** 2 == roughly(6, rel=0.1)


def test_the_epsilon_of_laplace_rounds_adds_up():
    privacy = fp.privacy.laplace(1.0, 4.0)
    assert privacy.guarantee(federation("uniform"), 20) == (5.0, 0.0)
    assert privacy.guarantee(federation("round_robin"), 20) == (2.5, 0.0)
    amplified = 20 * math.log(1 + 0.5 * (math.exp(0.25) - 1))
    assert privacy.guarantee(federation(), 20) == approx((amplified, 0.0))
    assert privacy.guarantee(federation(), 0).epsilon == 0
    assert fp.privacy.laplace(1.0, 0.0).guarantee(federation(), 3).epsilon == math.inf
    assert fp.privacy.laplace(1.0, 1e-9).guarantee(federation(), 3).epsilon == approx(3e9)


# ------------------------------------------------------------------------------- the paper's noise


def test_the_noise_of_the_paper_is_on_the_average_product_alone():
    uploads, template = draw(5)
    with pytest.warns(UserWarning, match="no privacy guarantee"):
        privacy = fp.privacy.paper_noise(0.3)
    algorithm = FEDAVG._replace(aggregator=aggregators.fra())
    assert privacy.protect(algorithm, federation()).weights == "size"
    guarantee = privacy.guarantee(federation(), 1)
    assert guarantee.epsilon == math.inf
    assert "no privacy guarantee" in privacy.statement(federation())
    noisy, plain = (
        run(one, uploads, template).update
        for one in (
            private(privacy, showing(aggregators.fra())),
            jax_plain(showing(aggregators.fra())),
        )
    )
    # The noise would be .3 here; two programs' averages of a few numbers of order one differ less.
    assert_close(noisy["rest"]["head.kernel"], plain["rest"]["head.kernel"], atol=1e-6)
    noise = noisy["products"]["x"] - plain["products"]["x"]
    assert noise.std() == roughly(0.3, rel=0.15)
    mean = np.einsum("kir,kro->io", uploads["x.lora_a"], uploads["x.lora_b"]) / CLIENTS
    assert_close(plain["products"]["x"], mean, atol=1e-4)


def jax_plain(base):
    """Returns an aggregator with a dense sum and no noise."""
    from fedjax_peft.privacy.lifted import streamed

    return base._replace(lift=lambda *inputs: streamed(base.lift(*inputs), base.name))


@pytest.mark.filterwarnings("ignore:The noise of the FRA-LoRA paper")
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_snr_compares_the_kept_directions_with_the_noise(kind):
    uploads, template = draw(6)
    got = run(private(fp.privacy.paper_noise(0.05, kind), aggregators.fra()), uploads, template)
    new = got.update
    (path,) = pairs(template)
    sigma = np.linalg.svd(new[f"{path}.lora_a"] @ new[f"{path}.lora_b"], compute_uv=False)
    expected = sigma[RANK - 1] / (0.05 * (math.sqrt(N_IN) + math.sqrt(N_OUT)))
    assert_close(got.metrics["snr"], expected, rtol=1e-4)
    assert_close(got.metrics[f"snr/{path}"], expected, rtol=1e-4)
    alone = {n: np.repeat(x[None], CLIENTS, axis=0) * 0 for n, x in template.items()}
    nothing = {n: 0 * x for n, x in template.items()}
    only_noise = run(private(fp.privacy.paper_noise(0.05, kind), aggregators.fra()), alone, nothing)
    assert only_noise.metrics["snr"] < 1


@pytest.mark.filterwarnings("ignore:The noise of the FRA-LoRA paper")
def test_the_noise_of_the_paper_is_on_everything_where_nothing_is_a_product():
    uploads, template = draw(7)
    got = run(private(fp.privacy.paper_noise(0.3), aggregators.mean()), uploads, template).update
    for n, x in template.items():
        noise = got[n] - (x + (uploads[n] - x).mean(axis=0))
        assert noise.std() == roughly(0.3, rel=0.3)


def test_a_noisy_share_of_clipped_clients_that_uses_up_the_guarantee_is_refused():
    refused("use up the whole guarantee", fp.privacy.adaptive, 1.0, 1.0, count_noise=0.5)
