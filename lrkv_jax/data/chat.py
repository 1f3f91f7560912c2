"""Conversations as token ids, and which of them a model learns to say.

    <bos> <user_start> … <user_end> <assistant_start> … <assistant_end> <user_start> …

and inside the assistant's turn, for the calculator: <python_start> 48/2 <python_end>
<output_start> 24 <output_end>. The format is nanochat's (tokenizer.py:render_conversation).
Imported models keep theirs, ChatML's or Llama 3's, which have no calculator (`FRAMES`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from lrkv_jax.data.conversation import Conversation, Message
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


@dataclass(frozen=True)
class Frame:
    """What stands around messages: names of tokens, and text, where {} is the message.

    `end` is the token that ends an answer, `between` the text after it.
    """

    user: tuple[str, ...]
    assistant: tuple[str, ...]
    end: str
    between: str = ""


FRAMES = (
    Frame(("<|user_start|>", "{}", "<|user_end|>"), ("<|assistant_start|>",), "<|assistant_end|>"),
    Frame(  # ChatML
        ("<|im_start|>", "user\n{}", "<|im_end|>", "\n"),
        ("<|im_start|>", "assistant\n"),
        "<|im_end|>",
        "\n",
    ),
    Frame(  # Llama 3
        ("<|start_header_id|>", "user", "<|end_header_id|>", "\n\n{}", "<|eot_id|>"),
        ("<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"),
        "<|eot_id|>",
    ),
)


class ChatFormat:
    """How a conversation becomes the ids of a tokenizer.

    `ids` are nanochat's; of another chat it has the end of an answer, and -1 for what it lacks.
    `start` is what a chat begins with, `between` what follows an answer's end.

    A tokenizer without the chat's tokens is given the ids that follow its own: a model needs
    `vocabulary` ids then, and one that was pretrained without them grows by `init_from`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        own = tokenizer.chat or {n: tokenizer.vocabulary + i for i, n in enumerate(CHAT_NAMES)}
        self._frame = next(frame for frame in FRAMES if frame.end in own)
        self._names = own
        ids = ChatIds(*(own.get(name, -1) for name in CHAT_NAMES))
        self.ids = replace(ids, assistant_end=own[self._frame.end])
        self.start = [tokenizer.bos] if tokenizer.begins else []
        self.between = self._text(self._frame.between)
        self.vocabulary = max(tokenizer.vocabulary, *(i + 1 for i in own.values()))

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
        """Return a conversation's ids, BOS first, and which of them are targets.

        `all` counts every one, as the recipe does; `assistant` what the assistant writes: its text,
        its calls, and the tokens that end them, but no tool's output and no start of its turn.
        """
        ids, counted = list(self.start), [loss == "all"] * len(self.start)
        for message in conversation.alternating().messages:
            for stretch, written in self._stretches(message):
                ids += stretch
                counted += [written or loss == "all"] * len(stretch)
        return np.array(ids, np.int32), np.array(counted)

    def prompt(self, conversation: Conversation) -> list[int]:
        """The ids of a conversation up to the start of the assistant's answer.

        Raises LrkvError for a conversation whose last turn is the assistant's.
        """
        if conversation.messages[-1].role == "assistant":
            raise LrkvError(
                "the conversation ends with an answer, and nothing is asked: end with the user's "
                "message (an answer that is begun is not continued)"
            )
        return [*self.render(conversation)[0].tolist(), *self._framed(self._frame.assistant)]

    def turn(self, text: str) -> list[int]:
        """The ids that a user's next message adds to a chat, up to the start of the answer."""
        return self._framed(self._frame.user, text) + self._framed(self._frame.assistant)

    def output(self, text: str) -> list[int]:
        """The ids that the calculator's result adds after a call."""
        return [self.ids.output_start, *self._text(text), self.ids.output_end]

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an answer or a call to the calculator."""
        ends = (self.ids.assistant_end, self.tokenizer.bos, self.ids.python_end)
        return tuple(i for i in ends if i >= 0)

    def call_in(self, ids: list[int]) -> str | None:
        """The expression of the call that an answer's `ids` end with, if one does."""
        if not ids or ids[-1] != self.ids.python_end:
            return None
        start = next((i for i in range(len(ids))[::-1] if ids[i] == self.ids.python_start), None)
        return None if start is None else self.tokenizer.decode(ids[start + 1 : -1])

    def written(self, ids: Sequence[int]) -> str:
        """An answer's ids as text, a call and its output as GSM8K writes them: <<48/2=24>>."""
        writer = Writer(self)
        pieces = [writer.piece(token) for token in ids]
        return b"".join([*pieces, writer.rest()]).decode("utf-8", "replace")

    def _stretches(self, message: Message):
        """Yield a message's ids in order, each stretch with whether the assistant writes it."""
        at = self.ids
        if message.role == "user":
            text = "".join(part.text for part in message.parts)
            yield self._framed(self._frame.user, text), False
            return
        if at.python_start < 0 and any(part.kind != "text" for part in message.parts):
            raise LrkvError(
                f"tokenizer {self.tokenizer.name} has no tokens for the calculator: leave out "
                "conversations that call it"
            )
        yield self._framed(self._frame.assistant), False
        for part in message.parts:
            ids = self._text(part.text)
            if part.kind == "python":
                yield [at.python_start, *ids, at.python_end], True
            elif part.kind == "output":
                yield self.output(part.text), False
            else:
                yield ids, True
        yield [at.assistant_end], True
        yield self.between, False

    def _framed(self, frame: Sequence[str], text: str = "") -> list[int]:
        ids: list[int] = []
        for part in frame:
            named = part in self._names
            ids += [self._names[part]] if named else self._text(part.replace("{}", text))
        return ids

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()


class Writer:
    """An answer's ids, as they come, to the bytes of its text."""

    def __init__(self, chat: ChatFormat):
        ids = chat.ids
        self._ids, self._decode = ids, chat.tokenizer.decode_bytes
        self._marks = {ids.python_start: b"<<", ids.output_start: b"=", ids.output_end: b">>"}
        self._called = False  # the last id ended a call

    def piece(self, token: int) -> bytes:
        """What the next id adds; how a call ends is told by the id after it."""
        unanswered = self._called and token != self._ids.output_start
        self._called = token == self._ids.python_end
        own = b"" if self._called else self._marks.get(token) or self._decode([token])
        return (b">>" if unanswered else b"") + own

    def rest(self) -> bytes:
        """What is left when no more comes."""
        return b">>" if self._called else b""
