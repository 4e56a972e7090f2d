"""Flower's side: the messages, the nodes, and what is said where one of them fails."""

import sys
from types import SimpleNamespace

import pytest
import toy
from closeness import assert_trees_close
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.deploy import nodes as flower
from fedjax_peft.deploy.rounds import Lost
from fedjax_peft.deploy.wire import pack


class Message:
    """A message of Flower, of which only what is used is here."""

    def __init__(self, content, node=None, kind="", *, group_id="", ttl=None, reply_to=None):
        self.content, self.node, self.ttl = content, node, ttl
        reply = None if reply_to is None else id(reply_to)
        self.metadata = SimpleNamespace(reply_to_message_id=reply, message_type=kind)
        self.error = None

    def has_error(self):
        return self.error is not None


SIDES = ("Client", "Server")


class App:
    """A ``ClientApp`` or a ``ServerApp``: the functions that are registered."""

    def __init__(self):
        self.functions = {}

    def __getattr__(self, kind):
        return lambda: lambda function: self.functions.setdefault(kind, function)


class Grid:
    """A grid whose nodes answer at once, unless they are ``silent``.

    Args:
      answers: node -> (message) -> bytes, or a text: an error of Flower.
    """

    def __init__(self, answers):
        self.answers, self.waiting, self.silent = answers, {}, set()

    def get_node_ids(self):
        return [*self.answers]

    def push_messages(self, messages):
        for message in messages:
            self.waiting[id(message)] = message
        return [id(message) for message in messages]

    def pull_messages(self, numbers):
        made = []
        for number in numbers:
            message = self.waiting.get(number)
            if message is None or message.node in self.silent:
                continue
            answer = self.answers[message.node](message)
            reply = Message(None, reply_to=message)
            if isinstance(answer, str):
                reply.error = SimpleNamespace(reason=answer, code=8)
            else:
                reply.content = flower._content(answer, {})
            made.append(reply)
        return made


@pytest.fixture(autouse=True)
def without_flower(monkeypatch):
    """Puts the few names of Flower that are used in its place: it is not installed here."""
    array = SimpleNamespace(
        Array=lambda dtype, shape, kind, data: SimpleNamespace(data=data),
        **{"ArrayRecord": dict, "ConfigRecord": dict, "RecordDict": dict, "Message": Message},
    )
    sides = {f"{side.lower()}app": SimpleNamespace(**{f"{side}App": App}) for side in SIDES}
    monkeypatch.setattr(flower, "_flwr", lambda: SimpleNamespace(app=array, **sides))
    monkeypatch.setattr(flower, "_POLL", 0.001)


def hello(number):
    return lambda message: pack({}, {"client": number})


def nodes(answers, deadline=0.02, patience=0.05):
    return flower._Nodes(Grid(answers), patience, deadline)


def test_nodes_say_which_clients_they_are():
    """Their order is not that of the clients, and one that starts late is waited for."""
    exchange = nodes({70: hello(1), 80: hello(0)})
    assert {*exchange.greet(b"", 2)} == {0, 1}
    assert exchange._nodes == {1: 70, 0: 80}
    assert {*nodes({70: hello(1)}).greet(b"", 2)} == {1}  # the patience is at its end


def test_numbers_that_cannot_be_are_refused():
    refused("client 1, which is there already", nodes({7: hello(1), 8: hello(1)}).greet, b"", 2)
    refused("client 5, which is not below 2", nodes({7: hello(5)}).greet, b"", 2)
    error = pack({}, {"error": "there is no file", "client": 0})
    refused("A client cannot begin: 'there is no file'", nodes({7: lambda m: error}).greet, b"", 2)
    for config in ({}, {"client": "two"}, {"client": -1}):
        refused("which client it is", flower._number, SimpleNamespace(node_config=config))
    assert flower._number(SimpleNamespace(node_config={"partition-id": 3})) == 3


def test_what_does_not_come_is_lost_with_its_reason():
    """Clients that answer, fail, are late, and are not connected any more."""
    exchange = nodes({1: hello(0), 2: hello(1), 3: hello(2), 4: hello(3)})
    exchange.greet(b"", 4)
    grid = exchange._grid
    grid.answers[1] = lambda message: bytes([message.content["table"]["kept"]])
    grid.answers[2] = lambda message: "out of memory"
    grid.silent.add(3)
    del grid.answers[4]
    found = dict(exchange.train(5, b"message", {0: 4, 1: 0, 2: 0, 3: 0}))
    assert found == {
        0: b"\x04",
        1: "out of memory",
        2: "no answer within 0.02 seconds",
        3: "its SuperNode is not connected",
    }
    assert all(isinstance(found[client], Lost) for client in (1, 2, 3))


@pytest.mark.parametrize("noticed", [True, False])
def test_a_node_that_is_started_again_is_found(noticed):
    """Also while Flower has not noticed yet that the earlier one is gone."""
    exchange = nodes({1: hello(0), 2: hello(1)}, deadline=5)
    exchange.greet(b"", 2)
    grid = exchange._grid
    grid.silent.add(2)
    if noticed:
        del grid.answers[2]
    grid.answers[9] = lambda message: (
        pack({}, {"client": 1}) if message.metadata.message_type == "query" else b"trained"
    )
    grid.answers[1] = lambda message: b"trained"
    for round_index in (2, 3):
        found = dict(exchange.train(round_index, b"", {0: 1, 1: 1}))
        assert found == {0: b"trained", 1: b"trained"}


def test_a_node_whose_process_has_failed_is_asked_again(capsys):
    answers = ["Task expired", pack({}, {"client": 0})]
    exchange = nodes({5: lambda message: answers.pop(0)}, patience=1)
    assert {*exchange.greet(b"", 1)} == {0}
    assert "node 5 has failed: Task expired" in capsys.readouterr().out


def test_a_message_without_bytes_is_refused():
    refused("has no bytes", flower._bytes, {})
    exchange = nodes({1: hello(0)})
    exchange.greet(b"", 1)
    exchange._grid.pull_messages = lambda numbers: [
        SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=n), content={}, has_error=bool)
        for n in numbers
    ]
    ((_, why),) = exchange.train(1, b"", {0: 0})
    assert "has no bytes" in why


def test_flower_must_be_installed(monkeypatch):
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flwr", None)
        refused("pip install .flwr", fp.deploy.flower, None, None, None, clients=2, rounds=1)


def test_two_apps_are_a_run(tmp_path, monkeypatch, capsys):
    """A whole run through the messages of Flower; a client that cannot begin says why."""
    monkeypatch.chdir(tmp_path)
    federation = toy.clients([6, 4])
    algorithm = fp.algorithms.fedavg(fp.optimizers.sgd(0.1))
    how = {"rounds": 2, "batch_size": 4}

    def examples(context):
        return federation.data.take(federation.indices[context.node_config["client"]])

    client_app, server_app = fp.deploy.flower(
        *(toy.lora_model, lambda: algorithm, examples), clients=2, **how, out=tmp_path / "run"
    )

    def node(**config):
        def answer(message):
            function = client_app.functions[message.metadata.message_type]
            return flower._bytes(function(message, SimpleNamespace(node_config=config)).content)

        return answer

    server_app.functions["main"](Grid({7: node(client=1), 8: node(client=0)}), None)
    expected = fp.simulate(toy.lora_model(), algorithm, federation, **how)
    got = fp.load_run(tmp_path / "run", model=toy.lora_model(), algorithm=algorithm)
    assert_trees_close(got.server, expected.server, rtol=0, atol=1e-6)
    grid = Grid({7: node(client=1), 8: node(client="zero")})
    refused("which client it is", server_app.functions["main"], grid, None)
    assert "which client it is" in capsys.readouterr().out
