"""Conversations as token ids, and which of the ids are training targets.

    <bos> <user_start> … <user_end> <assistant_start> … <assistant_end> <user_start> …

and inside the assistant's turn, for the calculator: <python_start> 48/2 <python_end>
<output_start> 24 <output_end>. The format is nanochat's
(tokenizer.py:render_conversation). Imported models keep their chat template, which has
no calculator; one with nanochat's tokens is framed as ours.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.conversation import Conversation, Message, text_message
from lrkv_jax.data.tokenizer import CHAT_NAMES, Tokenizer
from lrkv_jax.errors import LrkvError

Loss = Literal["all", "assistant"]


@dataclass(frozen=True)
class ChatIds:
    """The ids that frame a chat, in the order of `CHAT_NAMES`."""

    user_start: int
    user_end: int
    assistant_start: int
    assistant_end: int
    python_start: int
    python_end: int
    output_start: int
    output_end: int


class ChatFormat:
    """How a conversation becomes the ids of a tokenizer.

    `ids` are nanochat's; of a template's chat it has the end of an answer, and -1 for the others.
    `eos_token_ids` are those that end an answer, `start` those that a chat begins with.

    For a tokenizer without the chat's tokens, the ids after its last are taken. A model then needs
    `vocabulary` ids, and one that was pretrained without them grows by `init_from`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        # No template writes the calculator's calls: with its tokens the frames are used.
        self.template = None if tokenizer.chat else tokenizer.template
        if self.template is not None:
            self.ids = ChatIds(-1, -1, -1, tokenizer.eos_token_ids[-1], -1, -1, -1, -1)
        elif tokenizer.chat:
            self.ids = ChatIds(*(tokenizer.chat[name] for name in CHAT_NAMES))
        else:
            self.ids = ChatIds(*(tokenizer.vocabulary + i for i in range(len(CHAT_NAMES))))
        self.eos_token_ids = tuple(
            dict.fromkeys((self.ids.assistant_end, *tokenizer.eos_token_ids))
        )
        self.start = [tokenizer.bos] if tokenizer.begins else []
        self.vocabulary = max(tokenizer.vocabulary, *(i + 1 for i in astuple(self.ids)))

    @property
    def marks_its_start(self) -> bool:
        """Whether each conversation begins with the tokenizer's BOS and has no other one."""
        turns = (text_message(role, "a") for role in ("user", "assistant") * 2)
        ids = self.render(Conversation(tuple(turns)))[0].tolist()
        return ids[0] == self.tokenizer.bos and ids.count(self.tokenizer.bos) == 1

    def trained(self, data: DataConfig) -> bool:
        """Whether a run with this data can be expected to chat.

        It was trained on conversations, or began with a model that was, or is another's, whose
        tokenizer has a chat.
        """
        imported = self.tokenizer.imported and bool(self.tokenizer.chat)
        return data.mixture is not None or data.chats or self.template is not None or imported

    def check(self, vocabulary: int) -> None:
        """Raise `LrkvError` if a model's vocabulary is too small to chat."""
        if vocabulary < self.vocabulary:
            raise LrkvError(
                f"model.vocabulary = {vocabulary} has no ids for the chat's tokens, which follow "
                f"tokenizer {self.tokenizer.name}'s: midtrain with model.vocabulary="
                f"{-(-self.vocabulary // 128) * 128}, or more"
            )

    def render(
        self, conversation: Conversation, loss: Loss = "all"
    ) -> tuple[Int[np.ndarray, "T"], Bool[np.ndarray, "T"]]:
        """Return a conversation's ids, and which of them are targets.

        `all` counts every one, as the recipe does; `assistant` what the assistant writes: its text,
        its calls, and the tokens that end them, but no tool's output and no start of its turn.
        """
        if self.template is not None:
            return self._rendered(conversation, loss)
        ids, counted = list(self.start), [loss == "all"] * len(self.start)
        for message in conversation.alternating().messages:
            for stretch, written in self._stretches(message):
                ids += stretch
                counted += [written or loss == "all"] * len(stretch)
        return np.array(ids, np.int32), np.array(counted)

    def prompt(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation up to the start of the assistant's answer.

        Raises LrkvError for a conversation whose last turn is the assistant's, and for one that
        the format does not take.
        """
        if conversation.messages[-1].role == "assistant":
            raise LrkvError(
                "the conversation ends with an answer, and nothing is asked: end with the user's "
                "message (an answer that is begun is not continued)"
            )
        if self.template is not None:
            return self._templated(conversation.messages, answers=True)
        return [*self.render(conversation)[0].tolist(), self.ids.assistant_start]

    def shown(self, conversation: Conversation) -> str:
        """The prompt for an answer as text, for logs."""
        if self.template is not None:
            turns = self._turns(conversation.messages)
            return self.template.plain(self.template.render(turns, answers=True))
        text = "".join(
            f"<|{message.role}_start|>{message.text}<|{message.role}_end|>"
            for message in conversation.alternating().messages
        )
        return f"{text}<|assistant_start|>"

    def _rendered(self, conversation: Conversation, loss: Loss):
        """`render` by the template: the assistant's is what its turn adds to the prompt before."""
        messages = conversation.messages
        ids = self._templated(messages)
        counted = np.full(len(ids), loss == "all")
        for number, message in enumerate(messages if loss == "assistant" else ()):
            if message.role != "assistant":
                continue
            before = self._templated(messages[:number], answers=True) if number else []
            after = self._templated(messages[: number + 1])
            if not number or after[: len(before)] != before or ids[: len(after)] != after:
                raise LrkvError(
                    f"{self.template.what} does not write message {number + 1} behind what asks "
                    "for it: train with data.mixture.loss=all"
                )
            ends = [at for at in range(len(before), len(after)) if after[at] in self.eos_token_ids]
            counted[len(before) : ends[-1] + 1 if ends else len(after)] = True
        return np.array(ids, np.int32), counted

    def _templated(self, messages: Sequence[Message], *, answers: bool = False) -> list[int]:
        """Ids of the messages by the template; no text of theirs becomes a special token."""
        rendered = self.template.render(self._turns(messages), answers=answers)
        parts = list(self.template.stretches(rendered))
        if len(parts) == 1 and not parts[0][1]:
            return self.tokenizer.encode_framed(rendered)
        # Behind a line's end: a tokenizer may put a space before a text that begins.
        line = self.tokenizer.encode_framed("\n")
        ids: list[int] = []
        for part, is_text in parts:
            encode = self.tokenizer if is_text else self.tokenizer.encode_framed
            behind = encode("\n" + part)
            ids += behind[len(line) :] if ids and behind[: len(line)] == line else encode(part)
        return ids

    def _turns(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        for message in messages:
            self._check_parts(message)
        return [{"role": message.role, "content": message.text} for message in messages]

    def turn(self, text: str) -> list[int]:
        """The ids that a user's next message adds to a chat, up to the start of the answer."""
        return [*self._user(text), self.ids.assistant_start]

    def output(self, text: str) -> list[int]:
        """The ids that the calculator's result adds after a call."""
        return [self.ids.output_start, *self.tokenizer(text), self.ids.output_end]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer or a call to the calculator."""
        return tuple(i for i in (*self.eos_token_ids, self.ids.python_end) if i >= 0)

    def call_in(self, ids: list[int]) -> str | None:
        """The expression of the call that an answer's `ids` end with, if one does."""
        if not ids or ids[-1] != self.ids.python_end:
            return None
        start = next((i for i in range(len(ids))[::-1] if ids[i] == self.ids.python_start), None)
        return None if start is None else self.tokenizer.decode(ids[start + 1 : -1])

    def decode_answer(self, ids: Sequence[int]) -> str:
        """An answer's ids as text, a call and its output as GSM8K writes them: <<48/2=24>>."""
        writer = Writer(self)
        pieces = [writer.piece(token) for token in ids]
        return b"".join([*pieces, writer.rest()]).decode("utf-8", "replace")

    def _stretches(self, message: Message):
        """Yield a message's ids in order, each stretch with whether the assistant writes it."""
        at = self.ids
        if message.role == "user":
            yield self._user(message.text), False
            return
        self._check_parts(message)
        yield [at.assistant_start], False
        for part in message.parts:
            ids = self.tokenizer(part.text)
            if part.kind == "python":
                yield [at.python_start, *ids, at.python_end], True
            elif part.kind == "output":
                yield self.output(part.text), False
            else:
                yield ids, True
        yield [at.assistant_end], True

    def _check_parts(self, message: Message) -> None:
        if self.ids.python_start < 0 and any(part.kind != "text" for part in message.parts):
            raise LrkvError(
                f"tokenizer {self.tokenizer.name} has no tokens for the calculator: leave out "
                "what calls it"
            )

    def _user(self, text: str) -> list[int]:
        return [self.ids.user_start, *self.tokenizer(text), self.ids.user_end]


class Writer:
    """An answer's ids, as they come, to the bytes of its text."""

    def __init__(self, chat: ChatFormat):
        ids = chat.ids
        self._ids, self._decode = ids, chat.tokenizer.decode_bytes
        self._marks = {ids.python_start: b"<<", ids.output_start: b"=", ids.output_end: b">>"}
        self._called = False  # the last id ended a call

    def piece(self, token: int) -> bytes:
        """The bytes that the next id adds; the id after a call decides how the call ends."""
        unanswered = self._called and token != self._ids.output_start
        self._called = token == self._ids.python_end
        own = b"" if self._called else self._marks.get(token) or self._decode([token])
        return (b">>" if unanswered else b"") + own

    def rest(self) -> bytes:
        """The bytes to add when no more ids come."""
        return b">>" if self._called else b""
