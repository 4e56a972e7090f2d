"""The work of a single client: its local update, and its upload before any stage."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.client import ClientContext, ClientUpdate
from fedjax_peft.contracts.model import Outputs
from fedjax_peft.contracts.types import Key, Params, PyTree
from fedjax_peft.contracts.upload import Participant, Upload
from fedjax_peft.engine.returned import check_client_state, check_upload, checked_client
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.start import RoundStart
from fedjax_peft.engine.uploads import as_received, relative_to
from fedjax_peft.numerics.forms import check_type


def client_update(setup: Setup, start: RoundStart, client: Participant) -> ClientUpdate:
    """Returns the functions of the client's local work, with the model in them."""
    source, mask = client.source, client.rank_mask
    fixed = {
        name: jnp.where(mask[name], x, 0) if name in mask else x
        for name, x in start.constants.fixed.items()
    }

    def apply(params: Params, batch: Any, key: Key | None, train: bool) -> Any:
        outputs = setup.apply(start.frozen, {**fixed, **params}, batch, key, train)
        check_type("The forward pass of a model", outputs, Outputs)
        return outputs

    facts = (fixed, source.round_index, client.number)
    context = ClientContext(apply, setup.task, *facts, salt=start.state.salt)
    update = checked_client(setup.algorithm.name, setup.algorithm.client(context))
    return relative_to(source.template, setup.transform, source.broadcast, update)


def first_upload(
    setup: Setup,
    start: RoundStart,
    client: Participant,
    local: PyTree,
    before: PyTree,
    weight: Array,
) -> Upload:
    """Returns the upload of a client after its local work, before any stage.

    Raises:
      InputError: the client sends or keeps something of another form than before.
    """
    value, own = client_update(setup, start, client).final(local)
    check_upload(setup.algorithm.name, value, start.template)
    check_client_state(setup.algorithm.name, own, before)
    own = as_received(client.rank_mask, own, before)
    return Upload(value, weight, client, start.template, own)
