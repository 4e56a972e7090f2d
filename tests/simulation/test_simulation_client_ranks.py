"""Clients with different LoRA ranks: masked rows add nothing, do not change and are not sent."""

import functools

import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx, assert_close
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import InputError, attach, lora

pytestmark = pytest.mark.slow

# Weight decay moves a parameter even where its gradient is zero.
ADAMW = optax.adamw(0.05, weight_decay=0.3)
CLIENTS, TEST = toy.clients([9, 4, 13, 6]), toy.dataset(20, seed=3)
FEDAVG, LOCAL = fp.algorithms.fedavg(ADAMW), fp.algorithms.local(ADAMW)
model = functools.cache(functools.partial(toy.model, dropout=0))


def run(ranks, algorithm=FEDAVG, **options):
    given = {"clients": CLIENTS, "test": TEST, "client_ranks": ranks, "model": model(), **options}
    return running.run(algorithm, **given)


def directions(params):
    """Returns the two directions of the toy's adapter, A's column and B's row of each."""
    a, b = np.asarray(params["layer.lora_a"]), np.asarray(params["layer.lora_b"])
    return [np.concatenate([a[:, j], b[j]]) for j in range(toy.RANK)]


@pytest.mark.parametrize("aggregator", [fp.aggregators.mean, fp.aggregators.fra])
@pytest.mark.sample("fra")
def test_full_ranks_equal_a_run_without_ranks(aggregator):
    algorithm = fp.algorithms.fedavg(ADAMW, aggregator=aggregator())
    one, other = run(None, algorithm), run([2, 2, 2, 2], algorithm)
    for name in one.params:
        assert_close(one.params[name], other.params[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", [[1, 2], np.array([1, 2]), range(1, 3)])
def test_ranks_may_be_any_sequence(given):
    ranks = fp.System(client_ranks=given).client_ranks
    assert (ranks, [type(rank) for rank in ranks]) == ((1, 2), [int, int])


def test_directions_without_a_client_never_change():
    result = run([1, 1, 1, 1], lanes=3)
    before, after = directions(result.model.trainable), directions(result.params)
    assert np.abs(after[0] - before[0]).max() > 1e-3
    np.testing.assert_array_equal(after[1], before[1])


def test_a_direction_moves_by_its_owners_share():
    # A client that does not own a direction sends it back as it came, bit for bit.
    alone = [run(ranks, rounds=1) for ranks in ([1, 1, 2, 1], [2, 2, 2, 2])]
    start = directions(alone[0].model.trainable)[1]
    one, all_four = (directions(r.params)[1] - start for r in alone)
    assert 0 < np.abs(one).max() < np.abs(all_four).max()
    # The mean is over all by size, so one owner of 13 among 32 moves it by 13/32 of its own step.
    own = run([1, 1, 2, 1], LOCAL, rounds=1).client_state
    own = directions({name: x[2] for name, x in own.items()})[1] - start
    assert_close(one, own * 13 / 32, rtol=0, atol=1e-6)


def test_a_client_trains_as_if_the_model_had_its_rank():
    small = model()
    cut = {
        name: x[:, :1] if name.endswith("lora_a") else x[:1] if "lora" in name else x
        for name, x in small.trainable.items()
    }
    wide = run([1, 1, 1, 1], rounds=2)
    narrow = run(None, model=small.replace(trainable=cut), rounds=2)
    assert_close(wide.params["layer.lora_b"][:1], narrow.params["layer.lora_b"], rtol=0, atol=1e-6)
    for row, other in zip(wide.metrics[1:], narrow.metrics[1:], strict=True):
        assert row["train_loss"] == approx(other["train_loss"], abs=1e-6)


def test_a_personal_model_is_evaluated_at_its_own_rank():
    poor, rich = (run([n], LOCAL, client_test=CLIENTS, rounds=1) for n in (1, 2))
    assert poor.metrics[0]["client_loss_mean"] != rich.metrics[0]["client_loss_mean"]
    mixed = run([1, 2], LOCAL, client_test=CLIENTS, rounds=1)
    scales = [mixed.client_params(c)["layer.lora_scale"].tolist() for c in range(4)]
    assert scales == [[1.5, 0.0], [1.5, 1.5]] * 2


def test_masked_rows_are_not_counted_as_sent():
    full, head = 4 * (5 * 2 + 2 * 6), 4 * (6 * 3 + 3)
    row = run([1, 1, 2, 1], rounds=1).metrics[1]
    assert row["bytes_up"] == row["bytes_down"] == 3 * (full // 2 + head) + full + head
    # A short list is repeated.
    assert run([1, 2], rounds=1).metrics[1]["bytes_up"] == 4 * (full * 3 // 4 + head)


def test_models_that_have_no_ranks():
    with pytest.raises(InputError, match="needs a model with LoRA"):
        run([1] * 4, model=attach(fp.testing.tiny_model(3), fp.peft.head_only()))
    refused("SVD start", run, [1] * 4, model=attach(fp.testing.tiny_model(3), lora(2, init="svd")))
