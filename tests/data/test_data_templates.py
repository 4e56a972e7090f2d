"""Conversations as tokens, with masks of the answers: those of transformers where it has them."""

import functools

import numpy as np
import pytest
import tiny_tokenizers
from internals import Table, encode_conversations
from refusals import refused
from tokenizers import processors

import fedjax_peft as fp
from fedjax_peft.data.encoders.conversations import encode_prompts
from fedjax_peft.data.templates import PLAIN, end_tokens, template_of

SPECIAL = ["<begin>", "<end>", "<turn>", "<close>", "<head>", "</head>"]


def turns(before, after, *, first="", system=True, strip=False):
    """Returns a chat template in the manner of a family.

    Args:
      before: text before the content of a message, an expression of jinja with ``message``.
      after: likewise after it.
      first: at the beginning.
      system: whether a system message is allowed.
      strip: whether spaces around the content are left out.
    """
    content = "message['content'] | trim" if strip else "message['content']"
    refuse = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('no system messages here') }}{% endif %}"
    )
    return (
        "{{ " + (first or "''") + " }}" + refuse * (not system) + "{% for message in messages %}"
        "{{ " + before + " }}"
        "{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ (" + content + ") + " + after + " }}{% endgeneration %}"
        "{% else %}{{ (" + content + ") + " + after + " }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{% set message = {'role': 'assistant'} %}"
        "{{ " + before + " }}{% endif %}"
    )


CHAT = {
    "llama": turns(
        "'<head>' + message['role'] + '</head>\\n\\n'", "'<close>'", first="'<begin>'", strip=True
    ),
    "qwen": turns("'<turn>' + message['role'] + '\\n'", "'<close>\\n'"),
    "gemma": turns(
        "'<turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n'",
        "'<close>\\n'",
        first="'<begin>'",
        system=False,
        strip=True,
    ),
    "smollm": turns("'<turn>' + message['role'] + '\\n'", "'<close>' + '\\n'", first="'<begin>'"),
}


def unmarked(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@functools.cache
def tokenizer(chat=None, kind="gpt2"):
    made = getattr(tiny_tokenizers, kind)()
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.bos_token, made.eos_token = "<begin>", "<end>"
    made.chat_template = chat
    return made


def talk(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}] * (system is not None) + messages


TALKS = [
    talk("Who built the lighthouse?", "Anders and Ib 🙂"),
    talk("When?", "1871", "And the lamp?", " It burns oil. ", "Thanks", "שלום"),
    talk("Where", ""),
]


def encode(tokenizer, talks, template=None, max_length=200):
    options = {"max_length": max_length, "name": "x", "template": template}
    table = Table("the file", {"messages": talks})
    return encode_conversations(table, (), tokenizer, **options)


def learned(tokenizer, data, row=0):
    """Returns the learned tokens of a row, each run of them as one text."""
    ids, mask = data.columns["input_ids"][row], data.columns["loss_mask"][row]
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    ends = np.flatnonzero(mask & ~np.concatenate([mask[1:], [False]])) + 1
    return [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
@pytest.mark.parametrize("family", CHAT)
def test_masks_equal_those_of_transformers(family, kind):
    own = tokenizer(CHAT[family], kind)
    talks = [[{**m, "content": m["content"].strip()} for m in talk] for talk in TALKS]
    data = encode(own, talks)
    for row, messages in enumerate(talks):
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        expected = own.apply_chat_template(messages, **options)
        size = len(expected["input_ids"])
        assert data.columns["attention_mask"][row].sum() == size
        assert data.columns["input_ids"][row, :size].tolist() == expected["input_ids"]
        mask = data.columns["loss_mask"][row]
        assert mask[:size].tolist() == [bool(x) for x in expected["assistant_masks"]]
        assert not mask[size:].any()
    assert [len(learned(own, data, row)) for row in range(3)] == [1, 3, 1]


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
@pytest.mark.parametrize("family", CHAT)
def test_prefixes_find_the_same_answers(family, kind):
    """Only the line end after an end-of-turn token is learned with marks, and not without."""
    own = tokenizer(CHAT[family], kind)
    marked = encode(own, TALKS)
    plain = tokenizer(unmarked(CHAT[family]), kind)
    found = encode(plain, TALKS)
    for name in ("input_ids", "attention_mask", "prompt_ids", "prompt_mask", "end_ids"):
        np.testing.assert_array_equal(found.columns[name], marked.columns[name])
    for row in range(3):
        texts = [text.removesuffix("\n") for text in learned(own, marked, row)]
        assert learned(plain, found, row) == texts
        assert all(text.endswith("<close>") for text in texts)


def test_an_answer_that_begins_with_a_space_is_learned():
    """Here the mask of transformers ends before it, and leaves out the last two answers."""
    own = tokenizer(CHAT["qwen"], "roberta")
    texts = [text.removesuffix("\n") for text in learned(own, encode(own, TALKS), 1)]
    assert texts == ["1871<close>", " It burns oil. <close>", "שלום<close>"]


@pytest.mark.parametrize("family", CHAT)
def test_a_model_is_asked_to_continue_the_prompt(family):
    own = tokenizer(CHAT[family])
    data = encode(own, TALKS)
    for row, messages in enumerate(TALKS):
        expected = own.apply_chat_template(messages[:-1], add_generation_prompt=True)
        ids, mask = (data.columns[f"prompt_{x}"][row] for x in ("ids", "mask"))
        assert ids[mask].tolist() == expected["input_ids"]
        assert np.all(np.diff(mask.astype(int)) >= 0)  # padded on the left
        whole = data.columns["input_ids"][row]
        assert whole[: len(expected["input_ids"])].tolist() == expected["input_ids"]
    assert data.references == ("Anders and Ib 🙂", "שלום", "")
    prompts = encode_prompts(own, ["Who built the lighthouse?", TALKS[1][:-1], "Where"])
    for name, column in prompts.items():
        np.testing.assert_array_equal(column, data.columns[name])


def test_ends():
    own = tokenizer(CHAT["qwen"])
    ids = own.convert_tokens_to_ids(["<end>", "<close>"])
    assert end_tokens(own, "chat") == tuple(ids)
    assert end_tokens(own, PLAIN) == (ids[0],)
    assert encode(own, TALKS).columns["end_ids"].tolist() == [ids] * 3


def test_a_template_that_rewrites_earlier_turns_is_refused():
    # As with Qwen3: only the last answer has a line of thoughts.
    thinks = (
        "{% for message in messages %}<turn>{{ message['role'] }}\n"
        "{% if loop.last and message['role'] == 'assistant' %}(thought)\n{% endif %}"
        "{{ message['content'] }}<close>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    own = tokenizer(thinks)
    assert learned(own, encode(own, TALKS[:1])) == ["(thought)\nAnders and Ib 🙂<close>"]
    refused(r"Row 2 of the file: .* up to message 2 differently", encode, own, TALKS)


def test_empty_thoughts_belong_to_the_prompt():
    """As with Qwen3. A model that learned them wrote them, and no answer equalled its reference."""
    empty = "(thoughts)\n\n(end)\n\n"
    own = tokenizer(
        "{% for message in messages %}<turn>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}" + empty + "{% endif %}"
        "{{ message['content'] }}<close>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}" + empty + "{% endif %}"
        "{% endif %}"
    )
    data = encode(own, TALKS[:1])
    assert learned(own, data) == ["Anders and Ib 🙂<close>"]
    ids, mask = (data.columns[f"prompt_{x}"][0] for x in ("ids", "mask"))
    assert own.decode(ids[mask]).endswith(f"<turn>assistant\n{empty}")


@pytest.mark.parametrize("marked", [False, True])
def test_a_template_with_the_date_is_the_same_on_every_day(marked):
    """As Llama 3's, which takes the clock's."""
    dated = CHAT["llama"] if marked else unmarked(CHAT["llama"])
    own = tokenizer("{{ strftime_now('%d %b %Y') }}" + dated)
    data = encode(own, TALKS)
    for row in range(3):
        ids, mask = (data.columns[name][row] for name in ("input_ids", "attention_mask"))
        assert own.decode(ids[mask]).startswith("26 Jul 2024<begin>")
        prompt, real = (data.columns[f"prompt_{x}"][row] for x in ("ids", "mask"))
        assert own.decode(prompt[real]).startswith("26 Jul 2024<begin>")


def test_a_template_that_refuses_a_conversation_is_quoted_with_the_row():
    own = tokenizer("{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}x")
    with pytest.raises(fp.InputError, match=r"Row 2 of the file does not fit .* too long"):
        encode(own, [TALKS[0], talk("a", "b", "c", "d")])


@pytest.mark.parametrize("mark", [str, unmarked])
@pytest.mark.parametrize(
    "family",
    [
        "gemma",  # refuses a system message
        "silent",  # leaves it out without a word
    ],
)
def test_a_system_message_comes_before_the_first_request_of_a_template_without_it(family, mark):
    skips = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
    own = tokenizer(mark(skips + CHAT["qwen"] if family == "silent" else CHAT[family]))
    said = "has no role 'system': a system message comes before the first request"
    with pytest.warns(UserWarning, match=said) as caught:
        data = encode(own, [TALKS[1], talk("a", "b", "c", "d", system="Be brief.")])
    assert len(caught) == 1
    assert [said in note for note in data.notes] == [True]
    expected = encode(own, [TALKS[1], talk("Be brief.\n\na", "b", "c", "d")])
    assert expected.notes == ()
    with pytest.warns(UserWarning, match=said):
        prompts = encode_prompts(own, ["x", talk("a", system="Be brief.")])
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(data.columns[name], column)
    for name, column in encode_prompts(own, ["x", "Be brief.\n\na"]).items():
        np.testing.assert_array_equal(prompts[name], column)


def test_a_system_message_stays_where_the_template_has_the_role():
    for family in ("qwen", "llama", "smollm"):
        own = tokenizer(CHAT[family])
        data = encode(own, [talk("a", "b", system="Be brief.")])
        ids, mask = data.columns["input_ids"][0], data.columns["attention_mask"][0]
        messages = talk("a", "b", system="Be brief.")
        assert own.decode(ids[mask]) == own.apply_chat_template(messages, tokenize=False)
        assert data.notes == ()


CALL = {"type": "function", "function": {"name": "sum", "arguments": {"of": [2, 2]}}}
TOOLS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "sum"},
    {"role": "tool", "content": "IV", "name": "roman"},
    {"role": "assistant", "content": "It is 4."},
]
WITH_TOOLS = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls', []) %}<call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<close>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def test_tools_are_written_by_a_template_that_has_them():
    own = tokenizer(WITH_TOOLS)
    data = encode(own, [TOOLS])
    ids, mask = data.columns["input_ids"][0], data.columns["attention_mask"][0]
    assert own.decode(ids[mask]) == own.apply_chat_template(TOOLS, tokenize=False)
    assert learned(own, data) == ['<call>sum{"of": [2, 2]}<close>', "It is 4.<close>"]
    assert data.references == ("It is 4.",)


@pytest.mark.parametrize("template", ["chat", "{prompt}>"])
def test_tools_are_messages_of_the_user_for_other_templates(template):
    own = tokenizer(
        "{% for m in messages if m['role'] not in ('user', 'assistant') %}"
        "{{ raise_exception('no role ' ~ m['role']) }}{% endfor %}" + unmarked(CHAT["qwen"])
    )
    with pytest.warns(UserWarning, match="tool") as caught:
        data = encode(own, [TOOLS, TALKS[0]], template)
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2
    assert "no role 'tool': what a tool answers is a message of the user" in texts[0]
    assert "does not write tool_calls: a call is JSON at the end of the answer" in texts[1]
    assert data.notes == tuple(texts)
    call = '{"name": "sum", "arguments": {"of": [2, 2]}}'
    expected = encode(own, [talk("2+2?", call, "4\n\nIV", "It is 4."), TALKS[0]], template)
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(data.columns[name], column)


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
@pytest.mark.parametrize("template", ["plain", "Q: {prompt} A: ", "{prompt}", "{prompt}\n>"])
def test_text_templates(template, kind):
    own = tokenizer(CHAT["qwen"], kind)
    data = encode(own, [*TALKS, talk("a", "b", system="Be brief.")], template)
    text = PLAIN if template == "plain" else template
    first = "" if kind == "gpt2" else "<begin>" * (own("")["input_ids"][:1] == [own.bos_token_id])
    for row, messages in enumerate(TALKS):
        ids, mask = (data.columns[name][row] for name in ("input_ids", "attention_mask"))
        pairs = zip(messages[::2], messages[1::2], strict=True)
        filled = [(text.replace("{prompt}", a["content"]), b["content"]) for a, b in pairs]
        assert own.decode(ids[mask]) == first + "".join(f"{a}{b}<end>" for a, b in filled)
        space = " " * text.endswith(" ")
        assert learned(own, data, row) == [f"{space}{b}<end>" for _, b in filled]
        prompt, real = (data.columns[f"prompt_{x}"][row] for x in ("ids", "mask"))
        size = real.sum()
        assert prompt[real].tolist() == ids[:size].tolist()  # as in training, to the token
        assert data.columns["loss_mask"][row, size]
    ids, mask = (data.columns[name][3] for name in ("input_ids", "attention_mask"))
    assert "Be brief.\n\na" in own.decode(ids[mask])


def test_a_tokenizer_that_begins_texts_also_begins_conversations():
    own = tiny_tokenizers.gpt2()
    own.add_special_tokens({"bos_token": "<s>"})
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", own.bos_token_id)]
    )
    data = encode(own, TALKS, "plain")
    assert (data.columns["input_ids"] == own.bos_token_id).sum(axis=1).tolist() == [1, 1, 1]
    assert np.all(data.columns["input_ids"][:, 0] == own.bos_token_id)
    first = data.columns["prompt_mask"].argmax(axis=1)
    assert np.all(data.columns["prompt_ids"][range(3), first] == own.bos_token_id)


def test_the_last_call_of_a_tokenizer_changes_nothing():
    own = tiny_tokenizers.gpt2()  # as the real one: a token for all purposes, no beginning
    own.bos_token = own.pad_token = own.eos_token
    before = encode(own, TALKS, "{prompt} ")
    own(["a", "b c"], padding="max_length", max_length=12, truncation=True)
    after = encode(own, TALKS, "{prompt} ")
    for name, column in before.columns.items():
        np.testing.assert_array_equal(after.columns[name], column)


def test_long_conversations_lose_their_end_and_long_prompts_their_beginning():
    own = tokenizer()
    whole = encode(own, TALKS, "{prompt}>")
    sizes = whole.columns["attention_mask"].sum(axis=1)
    cut = encode(own, TALKS, "{prompt}>", max_length=12)
    for name in ("input_ids", "attention_mask", "loss_mask"):
        np.testing.assert_array_equal(cut.columns[name], whole.columns[name][:, :12])
    assert cut.meta["cut_tokens"].tolist() == np.maximum(sizes - 12, 0).tolist()
    assert whole.meta["cut_tokens"].tolist() == [0, 0, 0]
    assert len(cut) == 3  # an example without a token to learn stays
    for row in range(3):
        long, short = (d.columns["prompt_ids"][row] for d in (whole, cut))
        real = [d.columns["prompt_mask"][row] for d in (whole, cut)]
        assert short[real[1]].tolist() == long[real[0]][-12:].tolist()
    assert cut.references == whole.references


def test_which_template():
    chat, base, bert = tokenizer(CHAT["qwen"]), tokenizer(), tiny_tokenizers.bert()
    assert template_of(chat, None) == "chat"
    assert template_of(base, None) == template_of(chat, "plain") == PLAIN
    for own, wrong, message in (
        (base, "chat", "needs a tokenizer with a chat template"),
        (base, "alpaca", "neither 'chat' nor 'plain' nor a text"),
        (base, "{prompt}{prompt}", "neither 'chat' nor 'plain' nor a text"),
        (bert, None, "no token for the end of a text"),
    ):
        refused(message, template_of, own, wrong)


def test_other_answers_are_read_anew():
    """The cache knows where the answers are, not only the text."""
    own = tokenizer()
    first = encode(own, [talk("a b", "c")], "{prompt} ")
    second = encode(own, [talk("a", "b c")], "{prompt} ")
    assert learned(own, first) != learned(own, second)


def test_no_conversations():
    columns = encode(tokenizer(), [], "plain").columns
    assert columns["input_ids"].shape == (0, 200)
    assert columns["prompt_ids"].shape == (0, 1)
