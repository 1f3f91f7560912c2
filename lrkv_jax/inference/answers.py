"""A chat's answers: decoded, with the calculator's output put in where it is called."""

from dataclasses import dataclass, field

from lrkv_jax.data.calculator import calculate
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.inference.engine import Engine
from lrkv_jax.inference.request import Sequence


@dataclass
class Answer:
    """An answer so far.

    ids: what it holds, without what ended it. calls: the calculator's, as (expression, output),
    output None where it was no sum. ended: whether the model ended its turn.
    """

    ids: list[int] = field(default_factory=list)
    calls: list[tuple[str, str | None]] = field(default_factory=list)
    ended: bool = False

    def text(self, chat: ChatFormat) -> str:
        """The answer as text, its calls as <<48/2=24>>."""
        return chat.decode_answer(self.ids)


class Answering:
    """An answer that grows as the engine advances.

    `sequence` was submitted or appended to with the turn that is answered, with the most ids of the
    answer as its new tokens, with the chat's stops, and to be retained. over: whether nothing more
    will come.
    """

    def __init__(self, engine: Engine, chat: ChatFormat, sequence: Sequence):
        self.sequence, self.answer, self.over = sequence, Answer(), False
        self._engine, self._chat = engine, chat

    def take(self) -> None:
        """Add what was decoded since the last time, and answer a call."""
        if self.over:
            return
        sequence, answer = self.sequence, self.answer
        answer.ids += sequence.tokens[sequence.answer_start + len(answer.ids) :]
        if not sequence.done:
            return
        stopped = sequence.result.finish_reason == "stop"
        if stopped and answer.ids[-1] != self._chat.ids.python_end:
            answer.ids.pop()
            answer.ended = True
        self.over = answer.ended or not (stopped and self._goes_on())

    def leave(self, ids: int) -> None:
        """Stop here; of the answer so many ids stay, in the cache too."""
        if not self.over or ids < len(self.answer.ids):
            del self.answer.ids[ids:]
            self.answer.ended, self.over = False, True
            self._engine.cancel(self.sequence, retain=self.sequence.answer_start + ids)

    def _goes_on(self):
        """Whether the answer goes on, after the calculator's output for a call."""
        answer, chat = self.answer, self._chat
        expression = chat.call_in(answer.ids)
        output = None if expression is None else calculate(expression)
        if expression is not None:
            answer.calls.append((expression, output))
        forced = [] if output is None else chat.output(output)
        left = self.sequence.max_length - len(self.sequence.tokens) - len(forced)
        if left < 1:
            return False
        answer.ids += forced
        self._engine.append(self.sequence, forced, left, same_turn=True)
        return True
