"""Algorithms of users that keep a client state but do not say how it begins."""

import optax
import pytest
import toy

from fedjax_peft import simulate
from fedjax_peft.algorithms import fedavg
from fedjax_peft.contracts import ClientUpdate
from fedjax_peft.simulation.records import Placement
from fedjax_peft.support.errors import InputError

PLAIN = fedavg(optax.sgd(0.1))


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

        return ClientUpdate(init, inner.step, final)

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
