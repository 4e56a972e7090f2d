"""Names of clients: in the rows and files of a run, and wherever one client is chosen."""

import dataclasses

import jax
import numpy as np
import pytest
import toy
from closeness import assert_close
from internals import client_distribution, client_scores, local_models
from refusals import refused
from running import PRIVATE, rows, run

import fedjax_peft as fp
from fedjax_peft.simulation.client_models import client_number, read_client, read_clients
from fedjax_peft.simulation.rows import client_names

NAMES = ("alice", "7", "<b>", "carol\n2")
STATE = {"x": np.zeros((4, 2))}
"""What four clients keep."""


@pytest.fixture(scope="module")
def federation():
    train, held = toy.clients([12] * 4).holdout(0.25)
    return dataclasses.replace(train, names=NAMES), held


@pytest.fixture(scope="module")
def named(federation, tmp_path_factory):
    train, held = federation
    options = {"client_test": held, "diagnostics": ["clients"]}
    return run(PRIVATE, clients=train, out=tmp_path_factory.mktemp("run") / "named", **options)


def test_names_change_nothing_else(federation, named):
    train, held = federation
    plain = dataclasses.replace(train, names=())
    other = run(PRIVATE, clients=plain, client_test=held, diagnostics=["clients"])
    assert rows(named, "client_names") == rows(other)
    assert named.client_names == NAMES
    assert other.client_names == ()
    assert [("client_names" in row) for row in named.metrics] == [True, False, False]


def test_a_client_is_chosen_by_its_name(named):
    data = toy.dataset(5)
    for number, name in enumerate(NAMES):
        jax.tree.map(
            np.testing.assert_array_equal, named.client_params(name), named.client_params(number)
        )
        assert_close(named.predict(data, client=name), named.predict(data, client=number), rtol=0)
        assert str(named.scores_by_class(data, client=name)) == str(
            named.scores_by_class(data, client=number)
        )
    refused(r"no client 'alicia'\. Did you mean 'alice'", named.predict, data, client="alicia")
    refused("no client 9", named.client_params, 9)


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("1", NAMES, 1),
        ("7", NAMES, 1),  # no number of a client, but a name
        ("alice", NAMES, 0),
        ("0", (), 0),
        ("2", ("2", "3", "0", "1"), 2),  # numbers go first
    ],
)
def test_the_command_line_takes_a_number_or_else_a_name(text, names, expected):
    assert read_client(text, STATE, names) == expected


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        ("9", NAMES, "There is no client 9: the run has 4"),
        ("-1", NAMES, "There is no client -1"),
        ("bob", NAMES, "There is no client 'bob'. Known: "),
        ("bob", (), "There is no client 'bob': this run's clients have numbers, and no names"),
        ("", (), "There is no client ''"),
    ],
)
def test_a_client_that_does_not_exist_is_refused(text, names, said):
    with pytest.raises(fp.InputError) as error:
        read_client(text, STATE, names)
    assert said in str(error.value)


def test_several_clients_are_named_in_a_list():
    assert read_clients("carol\n2, alice,1", STATE, ("alice", "x", "y", "carol\n2")) == [0, 1, 3]
    assert read_clients("all", STATE, NAMES) == [0, 1, 2, 3]
    assert client_number(np.int64(3), ()) == 3


def test_a_damaged_or_earlier_row_has_no_names():
    for first in ({}, {"client_names": "x"}, {"client_names": None}, {"client_names": {"a": 1}}):
        assert client_names([{"round": 0, **first}]) == ()
    assert client_names([]) == ()


def test_the_reports_table_and_files_have_the_names(named):
    runs = {"a": {0: named.metrics}}
    assert client_scores(runs).frame.names == ["alice", "7", "<b>", "carol 2"]
    data = client_distribution(runs).data
    assert [(row["client"], row["client_name"]) for row in data][:2] == [(0, "alice"), (1, "7")]
    plain = [{k: v for k, v in row.items() if k != "client_names"} for row in named.metrics]
    assert client_scores({"a": {0: plain}}).frame.names == ["0", "1", "2", "3"]
    assert "client_name" not in client_distribution({"a": {0: plain}}).data[0]


def test_a_number_that_is_another_client_in_another_run_stays_a_number(named):
    other = [{**named.metrics[0], "client_names": [*NAMES[::-1]]}, *named.metrics[1:]]
    both = client_scores({"a": {0: named.metrics}, "b": {0: other}})
    assert both.frame.names == ["0", "1", "2", "3"]


def test_lines_of_clients_have_their_names():
    found = [
        {"round": 0, "test_accuracy": 0.5, "client_names": ["alice", "bob"]},
        *({"round": r, "clients": [0, 1], "local_accuracy": [0.1, 0.2]} for r in (1, 2)),
    ]
    figure = local_models({"a": {0: found}})
    texts = [text.get_text() for text in figure.figure.legends[0].get_texts()]
    assert texts == ["alice", "bob", "Global model"]
    assert figure.data[0]["client_name"] == "alice"
