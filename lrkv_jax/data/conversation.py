"""A conversation as text: who says what, and which of it is a tool's call or a tool's answer.

The sets of midtraining, the chat and the benchmarks all become this; turning it into token ids is
another module's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from lrkv_jax.errors import LrkvError

Kind = Literal["text", "python", "output"]
Role = Literal["user", "assistant"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a message: plain text, an expression for the calculator, or its output.

    Raises LrkvError for another kind or empty text.
    """

    kind: Kind
    text: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise LrkvError(f"part of kind {self.kind!r}: use {', '.join(KINDS)}")
        if not self.text:
            raise LrkvError(f"a {self.kind} part is empty: leave it out")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. Only the assistant calls the tool and holds its output.

    Raises LrkvError for another role, no parts, or a tool's part in a user's turn.
    """

    role: Role
    parts: tuple[Part, ...]

    def __post_init__(self):
        if self.role not in ROLES:
            raise LrkvError(f"message of role {self.role!r}: use {' or '.join(ROLES)}")
        if not self.parts:
            raise LrkvError(f"the {self.role} message is empty: leave it out")
        tools = [part.kind for part in self.parts if part.kind != "text"]
        if self.role == "user" and tools:
            raise LrkvError(
                f"user message with a part of kind {tools[0]}: only the assistant has it"
            )


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of user and assistant, the user first; one that ends with the user waits for an answer.

    Raises LrkvError where there is no turn or the turns do not alternate.
    """

    messages: tuple[Message, ...]

    def __post_init__(self):
        if not self.messages:
            raise LrkvError("the conversation is empty: it needs a user message")
        for number, message in enumerate(self.messages):
            expected = ROLES[number % 2]
            if message.role != expected:
                raise LrkvError(
                    f"message {number + 1} is the {message.role}'s, expected the {expected}'s: "
                    "user and assistant take turns, the user first"
                )

    def unanswered(self) -> Conversation:
        """The conversation without its last message where that is the assistant's: the prompt."""
        if self.messages[-1].role == "user":
            return self
        return Conversation(self.messages[:-1])


def said(role: Role, text: str) -> Message:
    """A message of plain text. Raises LrkvError where it is empty."""
    return Message(role, (Part("text", text),) if text else ())


def exchange(question: str, answer: str) -> Conversation:
    """One question and its answer, both plain text. Raises LrkvError where one is empty."""
    return Conversation((said("user", question), said("assistant", answer)))


def conversation_from(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """From [{"role", "content"}], as chat data sets hold them.

    A leading system message has no tokens of its own: its text goes before the first user's, with
    an empty line between (nanochat's rule, tokenizer.py:render_conversation).

    Raises LrkvError that names the message: a system message elsewhere or without a user after it,
    turns that do not alternate, a missing key, empty content, another role.
    """
    for number, message in enumerate(messages, 1):
        if missing := {"role", "content"} - set(message):
            raise LrkvError(f"message {number} has no {' and no '.join(sorted(missing))}")
        role, content = message["role"], message["content"]
        if role == "system" and number > 1:
            raise LrkvError(f"message {number} is the system's: it can only stand first")
        if role not in ("system", *ROLES):
            raise LrkvError(f"message {number} has role {role!r}: use system, {', '.join(ROLES)}")
        if not isinstance(content, str):
            kind = type(content).__name__
            raise LrkvError(f"message {number} ({role}) has {kind} as content, not text")
        if not content and role != "system":
            raise LrkvError(f"message {number} ({role}) is empty: leave the conversation out")
    turns = list(messages)
    system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else ""
    spoken = [said(cast(Role, turn["role"]), turn["content"]) for turn in turns]
    if system and spoken and spoken[0].role == "user":
        spoken[0] = said("user", f"{system}\n\n{turns[0]['content']}")
    return Conversation(tuple(spoken))
