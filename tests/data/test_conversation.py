"""What a conversation may hold, and how chat data becomes one."""

import pytest

from lrkv_jax.data.conversation import (
    Conversation,
    Message,
    Part,
    conversation_from,
    exchange,
    text_message,
)
from lrkv_jax.errors import LrkvError


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_a_leading_system_message_goes_before_the_first_users_and_an_empty_one_adds_nothing():
    got = conversation_from(turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hi")))
    assert [message.role for message in got.messages] == ["system", "user", "assistant"]
    assert got.alternating() == exchange("Be brief.\n\nHi", "Hi")
    got = conversation_from(turns(("system", ""), ("user", "Hi")))
    assert got == Conversation((text_message("user", "Hi"),))


def test_messages_of_one_role_that_follow_each_other_are_one_turn():
    roles = ("system", "system", "user", "user", "assistant", "assistant", "user")
    got = conversation_from(
        turns(*zip(roles, ("A", "B", "C", "D", " É\n", "F", "日"), strict=True))
    )
    expected = [("user", "A\n\nB\n\nC\n\nD"), ("assistant", " É\n\n\nF"), ("user", "日")]
    assert [(m.role, m.text) for m in got.alternating().messages] == expected
    assert got.alternating().alternating() == got.alternating()
    sum_ = Message("assistant", (Part("python", "1+1"), Part("output", "2")))
    whole = Conversation((text_message("user", "?"), sum_, text_message("assistant", "2.")))
    kinds = [(part.kind, part.text) for part in whole.alternating().messages[1].parts]
    assert kinds == [("python", "1+1"), ("output", "2"), ("text", "\n\n2.")]


def test_the_prompt_is_all_but_the_last_answer():
    asked = Conversation((text_message("user", "Hi"),))
    assert exchange("Hi", "Ho").unanswered() == asked
    assert asked.unanswered() == asked


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], "is empty"),
        (turns(("system", "x")), "is empty"),
        (turns(("assistant", "x")), "message 1 is the assistant's"),
        (turns(("system", "x"), ("assistant", "y")), "message 2 is the assistant's"),
        (turns(("user", "x"), ("system", "y")), "message 2 is the system's"),
        (turns(("user", "x"), ("assistant", "")), r"message 2 \(assistant\) is empty"),
        (turns(("user", "x"), ("tool", "y")), "message 2 has role 'tool': use .*tools are not"),
        (["x"], "message 1 has no role and content"),
        ([{"role": "user"}], "message 1 has no role and content"),
        ([{"role": "user", "content": None}], r"\(user\) has NoneType as content, not text"),
    ],
)
def test_what_is_no_conversation_is_refused_by_message(messages, line):
    with pytest.raises(LrkvError, match=line):
        conversation_from(messages).alternating()
