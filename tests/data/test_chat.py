"""What a conversation may hold, its ids and targets, and that nobody can forge a frame."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrkv_jax.data.assets import read_asset
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import (
    Conversation,
    Message,
    Part,
    conversation_from,
    exchange,
    text_message,
)
from lrkv_jax.data.tokenizer import CHAT_NAMES, load_tokenizer
from lrkv_jax.errors import LrkvError

SMALL = ChatFormat(load_tokenizer("sotu-4096"))
SUM = Conversation(
    (
        text_message("user", "What is 48/2?"),
        Message("assistant", (Part("text", "It is "), Part("python", "48/2"), Part("output", "24"),
                              Part("text", "24."))),
        text_message("user", "Thanks"),
    )
)  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "sotu-4096"])
def test_a_rendered_conversation_reads_as_it_should(name):
    tokenizer = load_tokenizer(name)
    chat = ChatFormat(tokenizer)
    names = {**{getattr(chat.ids, n.strip("<|>")): n for n in CHAT_NAMES}, tokenizer.bos: "<bos>"}

    def spelled(ids):
        return "".join(names.get(i) or tokenizer.decode([i]) for i in map(int, ids))

    ids, counted = chat.render(SUM)
    whole = (
        "<bos><|user_start|>What is 48/2?<|user_end|><|assistant_start|>It is <|python_start|>48/2"
        "<|python_end|><|output_start|>24<|output_end|>24.<|assistant_end|><|user_start|>Thanks"
        "<|user_end|>"
    )
    assert spelled(ids) == whole and counted.all()
    whole_ids = ids.tolist()
    same, counted = chat.render(SUM, "assistant")
    np.testing.assert_array_equal(same, ids)
    assert spelled(ids[counted]) == "It is <|python_start|>48/2<|python_end|>24.<|assistant_end|>"
    assert spelled(chat.prompt(SUM)) == whole + "<|assistant_start|>"
    first = Conversation(SUM.messages[:2])
    with pytest.raises(LrkvError, match="ends with an answer"):
        chat.prompt(first)
    turns = [*chat.render(first)[0].tolist(), *chat.turn("Thanks")]
    assert turns == chat.prompt(SUM), "a chat's turns, one by one, are the conversation"
    # A call is found at the end alone.
    end = whole_ids.index(chat.ids.python_end) + 1
    assert chat.call_in(whole_ids[:end]) == "48/2"
    assert chat.call_in(whole_ids) is None and chat.call_in([]) is None
    assert chat.call_in([chat.ids.python_end]) is None


def test_free_ids_of_gpt2_are_used_and_others_follow_the_vocabulary():
    gpt2, small = (ChatFormat(load_tokenizer(name)) for name in ("gpt2", "sotu-4096"))
    assert gpt2.vocabulary == 50304 and gpt2.ids.user_start == 50257
    assert small.ids.user_start == 4096 and small.vocabulary == 4104
    gpt2.check(50304)
    with pytest.raises(LrkvError, match="model.vocabulary = 4096 has no ids .*=4224"):
        small.check(4096)


def test_a_tokenizer_that_has_the_tokens_uses_them_and_one_with_some_is_refused(tmp_path):
    definition = json.loads(read_asset("sotu-4096.json"))

    def with_tokens(names):
        added = [
            {"id": 4096 + i, "content": name, "special": True, "single_word": False,
             "lstrip": False, "rstrip": False, "normalized": False}
            for i, name in enumerate(names)
        ]  # fmt: skip
        path = tmp_path / f"{len(names)}.json"
        extended = {**definition, "added_tokens": definition["added_tokens"] + added}
        path.write_text(json.dumps(extended))
        return load_tokenizer(str(path))

    tokenizer = with_tokens(CHAT_NAMES)
    assert tokenizer.vocabulary == 4104 and ChatFormat(tokenizer).ids.output_end == 4103
    assert not tokenizer.token_bytes[4096:].any(), "frames stand for no bytes"
    with pytest.raises(LrkvError, match="lacks <|output_end|>"):
        with_tokens(CHAT_NAMES[:-1])


@given(
    st.text(min_size=1, max_size=30)
    | st.lists(st.sampled_from([*CHAT_NAMES, "<|bos|>", "a"]), min_size=1).map("".join)
)
def test_no_text_forges_a_frame(text):
    frames = {SMALL.tokenizer.bos, *vars(SMALL.ids).values()}
    ids, _ = SMALL.render(exchange(text, text))
    assert sum(int(i) in frames for i in ids) == 5
    assert SMALL.tokenizer.decode(ids) == SMALL.tokenizer.decode(SMALL.tokenizer.encode(text)) * 2


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_a_leading_system_message_goes_before_the_first_users_and_an_empty_one_adds_nothing():
    got = conversation_from(turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hi")))
    assert [message.role for message in got.messages] == ["system", "user", "assistant"]
    assert got.alternating() == exchange("Be brief.\n\nHi", "Hi")
    asked = Conversation((text_message("user", "Hi"),))
    assert conversation_from(turns(("system", ""), ("user", "Hi"))) == asked
    # The prompt is all but the last answer.
    assert exchange("Hi", "Ho").unanswered() == asked == asked.unanswered()


def test_messages_of_one_role_that_follow_each_other_are_one_turn():
    roles = ("system", "system", "user", "user", "assistant", "assistant", "user")
    got = conversation_from(
        turns(*zip(roles, ("A", "B", "C", "D", " É\n", "F", "日"), strict=True))
    )
    expected = [("user", "A\n\nB\n\nC\n\nD"), ("assistant", " É\n\n\nF"), ("user", "日")]
    assert [(m.role, m.text) for m in got.alternating().messages] == expected
    assert got.alternating().alternating() == got.alternating()
    # They are joined before they are framed.
    assert SMALL.prompt(got) == SMALL.prompt(got.alternating())
    assert SMALL.render(got)[0].tolist() == SMALL.prompt(got)[:-1]
    sum_ = Message("assistant", (Part("python", "1+1"), Part("output", "2")))
    whole = Conversation((text_message("user", "?"), sum_, text_message("assistant", "2.")))
    kinds = [(part.kind, part.text) for part in whole.alternating().messages[1].parts]
    assert kinds == [("python", "1+1"), ("output", "2"), ("text", "\n\n2.")]


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], "is empty"),
        (turns(("assistant", "x")), "message 1 is the assistant's"),
        (turns(("system", "x"), ("assistant", "y")), "message 2 is the assistant's"),
        (turns(("user", "x"), ("system", "y")), "message 2 is the system's"),
        (turns(("user", "x"), ("assistant", "")), r"message 2 \(assistant\) is empty"),
        (turns(("user", "x"), ("tool", "y")), "message 2 has role 'tool': use .*tools are not"),
        (["x"], "message 1 has no role and content"),
        ([{"role": "user", "content": None}], r"\(user\) has NoneType as content, not text"),
    ],
)
def test_what_is_no_conversation_is_refused_by_message(messages, line):
    with pytest.raises(LrkvError, match=line):
        conversation_from(messages).alternating()
