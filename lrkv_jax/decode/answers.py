"""A chat's answers: decoded from the cache, with the calculator's output put in where it is called.

B sequences
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lrkv_jax.data.calculator import calculate
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.decode.sampling import Sampling
from lrkv_jax.decode.session import Session


@dataclass
class Answer:
    """One sequence's answer so far.

    ids: what it holds, without what ended it. budget: ids that it may still take. calls:
    the calculator's, as (expression, output), output None where it was no sum. ended: whether the
    model said that it is done.
    """

    budget: int
    ids: list[int] = field(default_factory=list)
    calls: list[tuple[str, str | None]] = field(default_factory=list)
    ended: bool = False

    def text(self, chat: ChatFormat) -> str:
        """The answer as text, its calls as <<48/2=24>>."""
        return chat.written(self.ids)


def answers(
    session: Session,
    chat: ChatFormat,
    turns: Sequence[Sequence[int]],
    budgets: Sequence[int],
    sampling: Sampling,
) -> Iterator[list[Answer]]:
    """Append turns that end where an answer starts, and decode the answers.

    Yields the same list of answers, one a turn, whenever they have grown by a token or an output,
    and ends when each has ended or used its budget. An answer depends on its own sequence alone,
    whatever others say and call. Tokens beyond a budget may be decoded, and are not taken.

    The cache needs room for the longest sequence and the largest budget, and for what the last call
    puts in. Raises `LrkvError` as `Session` does.
    """
    said = [Answer(budget) for budget in budgets]
    after: list[Sequence[int] | None] = list(turns)
    while any(tokens is not None for tokens in after):
        session.append(after)
        going = [row for row, tokens in enumerate(after) if tokens is not None]
        after = [None] * len(said)
        stream = session.stream(
            max(said[row].budget for row in going), sampling=sampling, stop=chat.stops
        )
        for tokens_B in stream:
            for row in going:
                if tokens_B[row] >= 0:
                    after[row] = _take(said[row], int(tokens_B[row]), chat)
            yield said
            if all(said[row].budget == 0 or said[row].ended for row in going):
                break
        stream.close()
        # A call is answered when its sequence goes on.
        after = [_go_on(answer, forced, chat) for answer, forced in zip(said, after, strict=True)]
        if any(after):
            yield said


def _take(answer: Answer, token: int, chat: ChatFormat) -> list[int] | None:
    """Add a token; returns what the calculator says, if that ended a call."""
    if answer.budget == 0 or answer.ended:
        return None
    if token in (chat.ids.assistant_end, chat.tokenizer.bos):
        answer.ended = True
        return None
    answer.ids.append(token)
    answer.budget -= 1
    if token != chat.ids.python_end:
        return None
    expression = chat.call_in(answer.ids)
    output = None if expression is None else calculate(expression)
    if expression is not None:
        answer.calls.append((expression, output))
    return [] if output is None else chat.output(output)


def _go_on(answer: Answer, forced: Sequence[int] | None, chat: ChatFormat) -> Sequence[int] | None:
    """What to append to a sequence that called; None for one that is done."""
    if forced is None or answer.ended or len(forced) >= answer.budget:
        return None
    answer.ids += forced
    answer.budget -= len(forced)
    return forced
