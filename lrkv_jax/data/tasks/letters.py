"""Multiple choice as the recipe asks it: the letter comes after its choice, and answers it."""

from __future__ import annotations

from lrkv_jax.data.conversation import Conversation, exchange
from lrkv_jax.data.tasks.examples import Choices


def question(example: Choices) -> str:
    """The user's message (nanochat, tasks/common.py:render_mc).

    The letter stands after the choice, which small models bind better, and right after "=", so that
    it is the very token of the answer (" A" is another one). The letters are the set's own labels:
    ARC's numeric ones are shown, and answered, as 1, 2, 3, 4.
    """
    pairs = zip(example.choices, example.labels, strict=True)
    lines = "".join(f"- {choice}={label}\n" for choice, label in pairs)
    return (
        f"Multiple Choice question: {example.question}\n{lines}\n"
        "Respond only with the letter of the correct answer."
    )


def conversation(example: Choices) -> Conversation:
    """The question and, as the whole answer, the right letter."""
    return exchange(question(example), example.labels[example.answer])
