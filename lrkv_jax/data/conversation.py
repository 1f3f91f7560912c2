"""A conversation as text: each turn's role, and which parts are a tool's calls and outputs.

The sets of midtraining, the chat and the benchmarks all become this; turning it into
token ids is another module's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from lrkv_jax.errors import LrkvError

Kind = Literal["text", "python", "output"]
Role = Literal["user", "assistant", "system"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a message: plain text, an expression for the calculator, or its output."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, of one part or more. Only the assistant calls the tool and holds its output.

    Raises LrkvError for no parts.
    """

    role: Role
    parts: tuple[Part, ...]

    def __post_init__(self):
        if not self.parts:
            raise LrkvError(f"the {self.role} message is empty: leave it out")

    @property
    def text(self) -> str:
        """The message's parts, joined."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order. A conversation whose last message is not the
    assistant's waits for an answer.

    Raises LrkvError where there is none.
    """

    messages: tuple[Message, ...]

    def __post_init__(self):
        if not self.messages:
            raise LrkvError("the conversation is empty: it needs a user message")

    def unanswered(self) -> Conversation:
        """The conversation without its last message where that is the assistant's: the prompt."""
        if self.messages[-1].role != "assistant":
            return self
        return Conversation(self.messages[:-1])

    def alternating(self) -> Conversation:
        """Turns of user and assistant, the user first, as a format without a system's turn has it.

        A system message at the start goes before the first user's text, with an
        empty line between (nanochat's rule, tokenizer.py:render_conversation); messages
        of one role that follow each other are one, with an empty line between.

        Raises LrkvError that names the message: one of the system's elsewhere or
        without a user's after it, and an assistant's that is first.
        """
        system: list[Part] = []
        turns: list[Message] = []
        for number, message in enumerate(self.messages, 1):
            if message.role == "system":
                if turns:
                    raise LrkvError(
                        f"message {number} is the system's: with this chat format it can only "
                        "stand first"
                    )
                system += [*message.parts, _EMPTY_LINE]
            elif not turns and message.role == "assistant":
                raise LrkvError(
                    f"message {number} is the assistant's, expected the user's: user and "
                    "assistant take turns, the user first"
                )
            elif turns and turns[-1].role == message.role:
                parts = (*turns[-1].parts, _EMPTY_LINE, *message.parts)
                turns[-1] = Message(message.role, _joined(parts))
            else:
                turns.append(Message(message.role, _joined((*system, *message.parts))))
                system = []
        if not turns:
            raise LrkvError("the conversation is empty: it needs a user message")
        return Conversation(tuple(turns))


_EMPTY_LINE = Part("text", "\n\n")


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts of which no two stretches of text follow each other."""
    made: list[Part] = []
    for part in parts:
        if made and made[-1].kind == part.kind == "text":
            made[-1] = Part("text", made[-1].text + part.text)
        else:
            made.append(part)
    return tuple(made)


def text_message(role: Role, text: str) -> Message:
    """A message of plain text. Raises LrkvError where it is empty."""
    return Message(role, (Part("text", text),) if text else ())


def exchange(question: str, answer: str) -> Conversation:
    """One question and its answer, both plain text. Raises LrkvError where one is empty."""
    return Conversation((text_message("user", question), text_message("assistant", answer)))


def without_empty_answers(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """[{"role", "content"}] without the assistant's empty ones, which a model may have given.

    The user's messages around one are then one, with an empty line between: some templates refuse
    two of a role.
    """
    kept: list[Mapping[str, Any]] = []
    dropped = False
    for message in messages:
        empty = message["role"] == "assistant" and not message["content"]
        around = dropped and kept and kept[-1]["role"] == message["role"] == "user"
        if around and message["content"]:
            content = kept[-1]["content"] + _EMPTY_LINE.text + message["content"]
            kept[-1] = {**message, "content": content}
        elif not empty:
            kept.append(message)
        dropped = empty
    return kept


def conversation_from(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """From [{"role", "content"}], as chat data sets and requests hold them.

    An empty system message is left out. The model's chat format checks the order of roles.

    Raises LrkvError that names the message: one without role and content, content that
    is empty or no text, another role.
    """
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise LrkvError(f"message {number} has no role and content: give both")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise LrkvError(
                f"message {number} has role {role!r}: use {', '.join(ROLES)} (tools are not called)"
            )
        if not isinstance(content, str):
            kind = type(content).__name__
            raise LrkvError(f"message {number} ({role}) has {kind} as content, not text: give text")
        if not content and role != "system":
            raise LrkvError(f"message {number} ({role}) is empty: leave it out")
        if content:
            found.append(text_message(cast(Role, role), content))
    return Conversation(tuple(found))
