"""Rows of the common forms become conversations; hostile rows are one error with their number."""

import json

import pytest
from internals import Reading, Table, load_tables
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft.data.conversations import with_messages
from fedjax_peft.data.formats.client_lists import read_client_lists

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def read(columns):
    return with_messages(Table("the file", columns))


FORMS = {
    "messages": {"messages": [TALK]},
    "sharegpt": {
        "conversations": [[{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]]
    },
    "completion": {"prompt": ["2+2?"], "completion": ["4"]},
    "response": {"prompt": ["2+2?"], "response": ["4"]},
    "trl": {"prompt": [TALK[:1]], "completion": [TALK[1:]]},
    "alpaca": {"instruction": ["2+2?"], "input": [""], "output": ["4"]},
    "alpaca without input": {"instruction": ["2+2?"], "output": ["4"]},
    "alpaca with null": {"instruction": ["2+2?"], "input": [None], "output": ["4"]},
    "dolly": {"instruction": ["2+2?"], "context": ["  "], "response": ["4"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    table = read({**FORMS[form], "who": ["a"]})
    assert dict(table.columns) == {"messages": [TALK], "who": ["a"]}


def test_an_input_follows_the_instruction_and_a_system_message_comes_first():
    table = read({"instruction": ["Add."], "input": ["2 2"], "output": ["4"]})
    assert table.columns["messages"][0][0]["content"] == "Add.\n\n2 2"
    table = read({"prompt": ["2+2?"], "completion": ["4"], "system": ["Be brief."]})
    assert table.columns["messages"] == [[{"role": "system", "content": "Be brief."}, *TALK]]


def test_messages_after_the_last_answer_are_left_out():
    more = [*TALK, {"role": "User", "content": "Sure?"}]
    assert read({"messages": [more]}).columns["messages"] == [TALK]


HOSTILE = {
    "has None in place of a list": None,
    "has [] in place of a list": [],
    "has 'hello' in place of a list": "hello",
    "message 2 is 'x', not an object": [TALK[0], "x"],
    "message 1 has the role 'narrator'": [{"role": "narrator", "content": "x"}],
    "message 1 has the fields text": [{"text": "x"}],
    "message 1 has 3 in place of a text": [{"role": "user", "content": 3}],
    "message 1 has a part of the type 'image_url'; only parts that are texts": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        TALK[1],
    ],
    "message 1 has the part 3; only": [{"role": "user", "content": [3]}, TALK[1]],
    "message 1 has the part {'type': 'text'}, which has no text": [
        {"role": "user", "content": [{"type": "text"}]}
    ],
    "message 2 has 'x' in place of a list of calls": [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": "x"},
    ],
    "message 2 has the role 'tool' and comes after": [TALK[0], {"role": "tool", "content": "x"}],
    "message 1 has the fields role, content": [{"role": "user", "content": None}],
    "message 1 has the role 'assistant' and comes first": [TALK[1]],
    "message 2 has the role 'user' and comes after": [TALK[0], TALK[0]],
    "no message of the role 'assistant'": [TALK[0]],
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_messages_are_named_with_their_row(message):
    with pytest.raises(fp.InputError) as caught:
        read({"messages": [TALK, HOSTILE[message]]})
    assert str(caught.value).startswith("Row 2 of the file")
    assert message in str(caught.value)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


UNEVEN = {
    "requests": ([user("a"), user("b"), assistant("c")], [user("a\n\nb"), assistant("c")]),
    "answers": (
        [user("a"), assistant("b"), assistant(""), assistant("c"), user("d")],
        [user("a"), assistant("b\n\nc")],
    ),
    "an answer first": (
        [assistant("Hello"), user("a"), assistant("c")],
        [user("a"), assistant("c")],
    ),
    "an answer after the system message": (
        [system("s"), assistant("Hello"), user("a"), assistant("c")],
        [system("s"), user("a"), assistant("c")],
    ),
    "two system messages": (
        [system("s"), system("t"), user("a"), assistant("c")],
        [system("s\n\nt"), user("a"), assistant("c")],
    ),
    "a late system message": (
        [user("a"), system("s"), assistant("b"), system("t"), assistant("c")],
        [user("a\n\ns"), assistant("b"), user("t"), assistant("c")],
    ),
    "no answer": ([user("a"), user("b")], None),
    "answers alone": ([assistant("a"), assistant("b")], None),
    "a tool that nobody called": (
        [user("a"), {"role": "tool", "content": "4"}, assistant("c")],
        None,
    ),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_rows_whose_roles_do_not_alternate_are_left_out_or_joined_and_counted(case):
    row, expected = UNEVEN[case]
    table = Table("the file", {"messages": [TALK, row, TALK], "who": ["a", "b", "c"]})
    remedy = r'turns = "skip"; to join messages of one role in a row, turns = "join"'
    refused(rf"Row 2 of the file.*{remedy}", with_messages, table)
    left_out = r"1 of 3 conversations of the file are left out.* The first is row 2\."
    with pytest.warns(UserWarning, match=left_out) as caught:
        skipped = with_messages(table, turns="skip")
    assert skipped.columns == {"messages": [TALK, TALK], "who": ["a", "c"]}
    assert skipped.row_numbers == [1, 3]
    assert skipped.notes == (str(caught[0].message),)
    changed = r"1 of 3 conversations of the file are changed.* The first is row 2\."
    with pytest.warns(UserWarning, match=left_out if expected is None else changed) as caught:
        joined = with_messages(table, turns="join")
    rows = [TALK, TALK] if expected is None else [TALK, expected, TALK]
    assert joined.columns["messages"] == rows
    assert joined.notes == (str(caught[0].message),)


def test_even_rows_are_the_same_with_every_option():
    table = Table("the file", {"messages": [TALK, [system("s"), *TALK]]})
    for turns in (None, "skip", "join"):
        found = with_messages(table, turns=turns)
        assert (found.columns["messages"], found.notes) == (table.columns["messages"], ())
    with pytest.raises(fp.InputError, match="No row of the file is a conversation"):
        with_messages(Table("the file", {"messages": [[user("a")]]}), turns="skip")


def test_parts_that_are_texts_and_further_names_of_roles():
    parts = [{"type": "text", "text": "2+"}, "2?", {"type": "output_text", "text": ""}]
    assert read({"messages": [[user(parts), assistant([{"type": "text", "text": "4"}])]]}).columns[
        "messages"
    ] == [[user("2+\n2?\n"), assistant("4")]]
    rows = [("developer", "s"), ("human", "a"), ("function_call", "f()"), ("observation", "4")]
    rows += [("ipython", "5"), ("model", "c")]
    said = [{"from": role, "value": text} for role, text in rows]
    roles = [x["role"] for x in read({"conversations": [said]}).columns["messages"][0]]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]


def test_calls_of_tools_keep_what_templates_read():
    """OpenAI writes the arguments as text; templates of Hugging Face read an object."""
    call = {"id": "1", "function": {"name": "sum", "arguments": '{"of": [2, 2]}'}, "index": None}
    told = {"role": "tool", "tool_call_id": "1", "content": "4", "name": None}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    [row] = read({"messages": [[user("a"), asks, told, assistant("c", tool_calls=None)]]}).columns[
        "messages"
    ]
    assert row[1]["content"] == ""
    assert row[1]["tool_calls"][0]["function"] == {"name": "sum", "arguments": {"of": [2, 2]}}
    assert row[2:] == [{"role": "tool", "content": "4", "tool_call_id": "1"}, assistant("c")]


def test_the_option_is_refused_elsewhere_and_by_other_names(tmp_path):
    write(tmp_path / "texts.jsonl", [{"text": "a", "label": "b"}] * 5)
    with pytest.raises(fp.InputError, match=r"turns = 'skip' means nothing to .*texts\.jsonl"):
        load_tables(tmp_path / "texts.jsonl", Reading(turns="skip"))
    refused("Did you mean 'skip'", load_tables, tmp_path / "texts.jsonl", Reading(turns="skips"))


MESSAGES = [  # id, parent, role, text, rank, deleted, author
    ("1", None, "prompter", "Hi", None, False, "ann"),
    ("2", "1", "assistant", "worse", 1, False, "bob"),
    ("3", "1", "assistant", "better", 0, False, "cid"),
    ("4", "3", "prompter", "And?", None, False, "ann"),
    ("5", "4", "assistant", "unranked", None, False, "bob"),
    ("6", "4", "assistant", "gone", 0, True, "bob"),
    ("7", None, "prompter", "Alone", None, False, "dot"),
    ("8", None, "prompter", "Asks", None, False, "eve"),
    ("9", "8", "assistant", "Answers", None, False, "ann"),
    ("10", "9", "prompter", "No answer", None, False, "eve"),
]
NAMES = ("message_id", "parent_id", "role", "text", "rank", "deleted", "author")


def tree(rows):
    return dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True))


test_hostile_rows_are_named = refusals(
    read,
    ({"prompt": ["a", "b"], "completion": ["c", None]}, "Row 2 of the file has None in place"),
    (
        {"prompt": [TALK[:1], "a"], "completion": [TALK[1:], "b"]},
        "Row 2 of the file has 'a' in",
    ),
    ({"instruction": ["a"], "input": [3], "output": ["c"]}, "Row 1 of the file has 3 in place"),
    ({"question": ["a"], "answer": ["b"]}, "no conversations, only the columns question"),
    (tree(MESSAGES[1:]), "Row 1 of the file answers the message '1', which is missing"),
    (tree([*MESSAGES, MESSAGES[0]]), "Row 11 of the file has a message_id that is not unique"),
)


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize("form", ["messages", "sharegpt", "completion", "alpaca", "dolly"])
def test_own_files_are_recognised_by_their_columns(tmp_path, form):
    row = {name: values[0] for name, values in FORMS[form].items()}
    write(tmp_path / "own.jsonl", [row | {"client": f"c{i % 2}"} for i in range(10)])
    entry, tables = load_tables(tmp_path / "own.jsonl")
    assert entry.task.name == "instruction_tuning"
    assert tables["train"].columns["messages"][0] == TALK
    assert set(tables["test"].columns["client"]) == {"c0", "c1"}


def test_own_column_names(tmp_path):
    write(tmp_path / "own.jsonl", [{"q": "2+2?", "a": "4"}] * 5)
    names = {"prompt": "q", "completion": "a"}
    _, tables = load_tables(tmp_path / "own.jsonl", Reading(columns=names, test_share=0.4))
    assert tables["test"].columns["messages"] == [TALK] * 2


def test_trees_give_their_best_conversation():
    table = read(tree(MESSAGES))
    texts = [[message["content"] for message in row] for row in table.columns["messages"]]
    assert texts == [["Hi", "better", "And?", "unranked"], ["Asks", "Answers"]]
    roles = [message["role"] for message in table.columns["messages"][0]]
    assert roles == ["user", "assistant"] * 2
    assert table.columns["author"] == ["ann", "eve"]
    assert table.row_numbers == [1, 8]


def test_lists_of_clients(tmp_path):
    rows = {"ann": [{"instruction": "2+2?", "response": "4"}] * 10, "bob": []}
    rows["cid"] = [{"instruction": "Hi", "response": "Ho"}] * 5
    (tmp_path / "aya.json").write_text(json.dumps(rows))
    _, tables = load_tables("fed_aya", Reading(source=str(tmp_path)))
    assert tables["train"].columns["messages"][0] == TALK
    assert set(tables["test"].columns["client"]) == {"ann", "cid"}
    (tmp_path / "aya.json").write_text(json.dumps({"ann": ["x"]}))
    refused(r"Row 1 of .* \(of the client 'ann'\) is not a JSON obj", read_client_lists, tmp_path)
    (tmp_path / "aya.json").write_text("[]")
    assert read_client_lists(tmp_path) is None
