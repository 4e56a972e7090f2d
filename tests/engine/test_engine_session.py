"""A session: rounds one by one, the same numbers as ``simulate``, and states that are consumed."""

import copy
import types

import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx, assert_trees_close
from internals import programs, round_row
from options import session_options
from refusals import refused
from running import CLIENTS as FEDERATION

import fedjax_peft as fp
from fedjax_peft import InputError, Placement, simulate
from fedjax_peft.engine.compilation import options_that_repeat

TEST = toy.dataset(26, seed=7)
TEXTS = fp.testing.tiny_dataset(24)
MODEL = toy.model()
OPTIONS = {"clients_per_round": 3, "batch_size": 4}
SHARED = fp.algorithms.fedavg(optax.adam(0.02))
PRIVATE = fp.algorithms.fedavg(optax.sgd(0.1), head="private")


def loop(algorithm, rounds, *, seed=0, **options):
    """Returns the session, its state after some rounds, and what these reported."""
    session = fp.session(MODEL, algorithm, FEDERATION, **session_options(**OPTIONS, **options))
    state, infos = session.init(seed), []
    for _ in range(rounds):
        state, info = session.step(state)
        infos.append(info)
    return session, state, infos


def equal(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("algorithm", [SHARED, PRIVATE])
def test_a_loop_over_a_session_gives_the_numbers_of_simulate(algorithm):
    options = {"model": MODEL, "test": TEST, "test_clients": 5, **OPTIONS}
    run = running.run(algorithm, rounds=3, seed=5, **options)
    session, state, infos = loop(algorithm, 3, seed=5)
    equal(state[:2], (run.server, run.client_state))
    assert (state.round_index, state.seed) == (3, 5)
    for info, row in zip(infos, run.metrics[1:], strict=True):
        made = round_row(info)
        assert made == {name: row[name] for name in made}
    scores = session.evaluate(state, TEST)
    last = run.metrics[-1]
    assert scores["accuracy"] == approx(last["test_accuracy"], abs=1e-6)
    assert scores["loss"] == approx(last["test_loss"], abs=1e-6)


def test_personal_models_can_be_evaluated_one_by_one():
    session, state, _ = loop(PRIVATE, 1)
    each = [session.evaluate(state, TEST, clients=[client])["loss"] for client in range(5)]
    assert np.std(each) > 0
    assert session.evaluate(state, TEST)["loss"] == approx(np.mean(each), abs=1e-6)


@pytest.mark.parametrize("first", ["global", "client 0"])
@pytest.mark.sample("global")
def test_the_global_model_is_not_that_of_the_first_client(first):
    """Which has a smaller rank; neither evaluation may take the other's program."""
    ranked = fp.attach(fp.testing.tiny_model(), fp.lora(rank=4))
    session = fp.session(
        *(ranked, fp.algorithms.fedavg(optax.adam(0.05)), fp.partition.iid(TEXTS, clients=4)),
        system=fp.System(client_ranks=[1, 4, 4, 4]),
        local_steps=2,
    )
    state, _ = session.step(session.init(0))
    clients = {"global": None, "client 0": [0]}
    names = [first, *(name for name in clients if name != first)]
    losses = {n: session.evaluate(state, TEXTS, clients=clients[n])["loss"] for n in names}
    assert losses["global"] != approx(losses["client 0"], rel=1e-4)
    everyone = session.evaluate(state, TEXTS, clients=[1])["loss"]
    assert losses["global"] == approx(everyone, rel=1e-6), "whose rank is that of the model"


def test_a_wrong_client_or_no_data_is_one_clear_error():
    session, state, _ = loop(SHARED, 1)
    for client in (5, -1):
        with pytest.raises(InputError, match=f"no client {client}: the last is 4"):
            session.evaluate(state, TEST, clients=[client])
    refused("Leave it out", session.evaluate, state, TEST, clients=[])
    refused("data set is empty", session.evaluate, state, toy.dataset(0))


def test_a_step_consumes_its_state_and_a_copy_survives():
    session, state, _ = loop(SHARED, 1)
    copy = state.copy()
    after, _ = session.step(state)
    refused(r"consumed by an earlier step.*state\.copy\(\)", session.step, state)
    refused("consumed", session.evaluate, state, TEST)
    assert (copy.round_index, copy.seed) == (1, 0)
    again, _ = session.step(copy)
    equal(after, again)


def test_a_state_that_was_saved_goes_on_as_the_first_one_did():
    session, state, _ = loop(PRIVATE, 2)
    saved = jax.device_get(state)  # plain numpy and integers: any format can hold it
    expected, _ = session.step(state)
    other = fp.session(MODEL, PRIVATE, FEDERATION, **session_options(**OPTIONS))
    restored, info = other.step(jax.tree.map(jnp.asarray, saved))
    equal(expected[:2], restored[:2])
    assert (restored.round_index, info.round_index) == (3, 3)


def test_seeds_of_one_session_do_not_mix_and_compile_once():
    session, _, infos = loop(SHARED, 2, seed=1)
    compiled = session.compile_seconds
    state = session.init(2)
    state, other = session.step(state)
    state, _ = session.step(state)
    assert session.compile_seconds == compiled
    assert other.plan.client.tolist() != infos[0].plan.client.tolist()
    equal(state, loop(SHARED, 2, seed=2)[1])


def test_a_round_in_which_nobody_takes_part_changes_nothing():
    session = fp.session(MODEL, SHARED, FEDERATION, sampling="poisson", clients_per_round=1)
    empty = next(n for n in range(1, 50) if not session.schedule(0).present(n))
    state = session.init(0)._replace(round_index=empty - 1)
    before = jax.device_get(state)
    state, info = session.step(state)
    equal(before[:2], state[:2])
    assert session.compile_seconds == 0
    assert round_row(info) == {
        "round": empty,
        "clients": [],
        "dropped": [],
        "steps": 0,
        "lanes": info.plan.lanes,
    }


def test_rounds_beyond_those_that_were_planned_get_the_room_that_they_need():
    options = {"sampling": "poisson", "clients_per_round": 2}
    small = fp.session(MODEL, SHARED, FEDERATION, rounds=1, **session_options(**options))
    sizes = [len(small.schedule(0).present(n)) for n in range(1, 30)]
    largest = int(np.argmax(sizes)) + 1
    assert sizes[0] < max(sizes)
    assert len(small.plan(1).client) == max(sizes[0], 1)
    assert len(small.plan(largest).client) >= max(sizes)


@pytest.mark.parametrize(
    ("platform", "text", "flags", "repeats"),
    [
        ("gpu", "stablehlo.dot_general", "", True),
        ("cpu", "stablehlo.dot_general", "", False),
        ("tpu", "stablehlo.dot_general", "", False),
        ("gpu", 'custom_call_target = "__cudnn$fmhaSoftmaxBackward"', "", False),
        ("gpu", "stablehlo.dot_general", "--xla_gpu_exclude_nondeterministic_ops=false", False),
    ],
)
def test_the_compiler_of_a_gpu_is_asked_for_operations_that_repeat(
    platform, text, flags, repeats, monkeypatch
):
    """But not with cuDNN's attention, for which XLA would find no kernel."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    lowered = types.SimpleNamespace(as_text=lambda: text)
    expected = {"xla_gpu_exclude_nondeterministic_ops": True} if repeats else None
    assert options_that_repeat(lowered, platform) == expected


def test_a_program_is_compiled_with_the_options_of_its_platform(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "fedjax_peft.engine.program.options_that_repeat",
        lambda lowered, platform: asked.append((platform, "dot_general" in lowered.as_text())),
    )
    session = fp.session(MODEL, SHARED, FEDERATION, **session_options(**OPTIONS))
    programs.clear(session.setup.apply)
    session.program(session.plan(1)).compile(session.init(0), session.plan(1))
    assert asked == [("cpu", True)]


@pytest.mark.slow
def test_the_program_of_a_gpu_has_loops_in_the_place_of_branches():
    """With clients of several lengths, which begin and end at different times in two lanes."""
    session = fp.session(
        MODEL,
        fp.algorithms.ditto(optax.adam(0.02)),
        FEDERATION,
        **session_options(**OPTIONS, lanes=2),
    )
    plan, found = session.plan(1), {}
    for name in ("cpu", "gpu"):
        layout = session.setup.layout._replace(platform=fp.contracts.Platform(name))
        program = copy.copy(session.program(plan))
        program._setup = session.setup._replace(layout=layout)
        lowered = program.lower(session.init(0), plan)
        text = lowered.as_text()
        ran = lowered.compile()(*program._arguments(session.init(0), plan, 0))
        found[name] = (text.count("stablehlo.case"), text.count("stablehlo.while"), ran.state)
    assert (found["cpu"][0] - found["gpu"][0], found["gpu"][1] - found["cpu"][1]) == (2, 2)
    assert_trees_close(found["gpu"][2], found["cpu"][2])


def test_an_unknown_engine_is_refused_with_the_nearest_one():
    with pytest.raises(InputError, match="Did you mean 'reference'"):
        fp.session(MODEL, SHARED, FEDERATION, placement=fp.Placement(engine="refrence"))


def test_the_reference_engine_keeps_the_values_of_a_state():
    """A rate of 0 in both rounds, although the session was made with another one."""
    inputs = (linear.model(), lambda p: fp.algorithms.fedavg(optax.sgd(p["rate"])))
    options = {"values": {"rate": 1.0}, "engine": "reference", "batch_size": 8}
    session = fp.session(*inputs, toy.clients((4,)), **session_options(**options))
    state = session.init(0, {"rate": 0.0})
    for _ in range(2):
        state, _ = session.step(state)
    for name, x in linear.model().trainable.items():
        np.testing.assert_array_equal(state.server[name], x)


def test_a_stage_changes_the_weight_of_an_upload_in_both_engines():
    def halved(upload):
        return upload._replace(weight=upload.weight / (1 + upload.client.number % 2))

    stages = fp.contracts.Stages(received=(halved,))
    attack = fp.contracts.Attack(
        "halved", lambda algorithm, _: fp.contracts.Wrapped(algorithm, stages), lambda clients: ()
    )
    inputs, after = (linear.model(), PLAIN, toy.clients((4, 4))), []
    for more in ({"engine": "reference"}, {}, {"attack": None}):
        options = {"attack": attack, "batch_size": 4, **more}
        session = fp.session(*inputs, **session_options(**options))
        after.append(session.step(session.init(0))[0].server)
    assert_trees_close(*after[:2])
    assert np.abs(after[0]["head.bias"] - after[2]["head.bias"]).max() > 1e-4


# --------------------------------- algorithms that keep a client state and do not say how it begins


PLAIN = fp.algorithms.fedavg(optax.sgd(0.1))


def forgetful(*, reads, keeps, **changes):
    def client(context):
        inner = PLAIN.client(context)

        def init(broadcast, client_state, key):
            if reads:
                client_state = {n: client_state[n] for n in ("previous",)}
            return inner.init(broadcast, {}, key)

        def final(state):
            upload, _ = inner.final(state)
            return upload, {"previous": upload} if keeps else {}

        return fp.contracts.ClientUpdate(init, inner.step, final)

    return PLAIN._replace(name="mine", client=client, **changes)


@pytest.mark.parametrize("engine", ["compiled", "reference"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reads": True, "keeps": True}, r"'mine' reads 'previous'.*init_client_state=lambda"),
        ({"reads": False, "keeps": True}, r"keeps another client state \(previous\) than it began"),
        (
            {"reads": True, "keeps": False, "init_client_state": lambda s, p: {"previous": s}},
            r"\(no entries\) than it began with \(previous\).*init_client_state",
        ),
    ],
    ids=["read", "kept", "lost"],
)
def test_a_forgotten_start_of_the_client_state_is_one_clear_error(options, message, engine):
    model, clients = toy.model(), toy.clients([4, 3])
    place = Placement(lanes=1, engine=engine)
    with pytest.raises(InputError, match=message):
        simulate(model, forgetful(**options), clients, rounds=1, batch_size=4, placement=place)
