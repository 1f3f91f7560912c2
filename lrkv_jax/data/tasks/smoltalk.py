"""HuggingFaceTB/smol-smoltalk: general conversations, midtraining's largest part."""

from typing import TypedDict

from lrkv_jax.data.conversation import Conversation, conversation_from
from lrkv_jax.data.tables import Schema
from lrkv_jax.errors import LrkvError


class _Message(TypedDict):
    role: str
    content: str


class SmolTalkRow(Schema):
    """`messages: [{role, content}]`, a leading system message or none."""

    messages: list[_Message]


def smoltalk_example(row: SmolTalkRow, id: str) -> Conversation | None:
    """A row as a conversation; None, to be left out, where a message of it is empty.

    There is nothing to learn from an empty turn, and nobody can mend a row of the hub's. The set
    names no rows, so `id` leaves no trace.

    Raises LrkvError as `conversation_from` does, and for a question without an answer.
    """
    if not all(message["content"] for message in row.messages if message["role"] != "system"):
        return None
    conversation = conversation_from(row.messages)
    if len(conversation.alternating().messages) < 2:
        raise LrkvError("column 'messages' holds a question without an answer")
    return conversation
