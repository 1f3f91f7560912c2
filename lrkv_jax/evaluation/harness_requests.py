"""Requests of the lm-evaluation-harness, read without it: groups, settings of texts, chats.

`harness_adapter` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import conversation_from
from lrkv_jax.data.tokenizer import CHAT_NAMES
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Sampling

# The harness's default for tasks that name none (models/huggingface.py).
NEW_TOKENS = 256
# Its names for one thing, the first one given counts.
_NEW_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = (
    *_NEW_TOKENS_NAMES, "until", "do_sample", "temperature", "top_k", "top_p", "num_beams",
)  # fmt: skip
OPENING = len(CHAT_NAMES[0])  # characters by which a chat's prompt is recognized


def grouped(keys: Sequence[Hashable]) -> list[list[int]]:
    """Group the places of equal keys; groups and places stay in order."""
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return list(groups.values())


@dataclass(frozen=True)
class GenerationSettings:
    """How a text is generated: up to the first of `until`, with at most `max_new_tokens`."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], context: int) -> GenerationSettings:
        """Read a task's generation_kwargs; the model reads up to `context` tokens.

        As the harness reads them: do_sample=false is greedy whatever the temperature;
        without do_sample a temperature above 0 samples. A task that names no number of
        tokens gets 256, or half of a context that is shorter than 512.

        Raises LrkvError for settings that the decoder does not have or that contradict each other.
        """
        unknown = {key for key in kwargs if key not in _KNOWN}
        if unknown or kwargs.get("num_beams", 1) != 1:
            raise LrkvError(
                f"generation_kwargs {', '.join(sorted(unknown or ['num_beams']))}: not known here; "
                "use until, max_gen_toks, do_sample, temperature, top_k, top_p"
            )
        name = next((n for n in _NEW_TOKENS_NAMES if kwargs.get(n) is not None), "")
        max_new_tokens = _number(kwargs, name, int, min(NEW_TOKENS, context // 2))
        if not 1 <= max_new_tokens < context:
            raise LrkvError(
                f"max_gen_toks = {max_new_tokens}: the model reads {context} tokens, so give "
                f"--gen_kwargs max_gen_toks=N of 1 to {context - 1}"
            )
        do_sample = kwargs.get("do_sample")
        temperature = _number(kwargs, "temperature", float, 1.0 if do_sample else 0.0)
        if do_sample and temperature == 0:
            raise LrkvError("do_sample at temperature = 0: give another, or do_sample=False")
        sampling = Sampling(
            0.0 if do_sample is False else temperature,
            _number(kwargs, "top_k", int, 0),
            _number(kwargs, "top_p", float, 1.0),
        )
        until = kwargs.get("until") or ()
        stops = until if isinstance(until, list | tuple) else [until]
        return cls(tuple(str(stop) for stop in stops if stop), max_new_tokens, sampling)


def _number(kwargs: Mapping[str, Any], name: str, kind: Callable[[Any], Any], otherwise: float):
    """A setting as a number, `otherwise` where the task names none."""
    value = kwargs.get(name)
    try:
        return otherwise if value is None else kind(value)
    except ValueError:
        raise LrkvError(f"generation_kwargs {name} = {value}: give a number") from None


class ChatPrompt(str):
    """A chat up to the start of the assistant's turn, as a string, which the harness expects.

    The tokens that frame a chat cannot be spelled in text, so the ids travel with it, and
    the text is for logs alone: whatever a user writes, no text becomes a frame. It
    survives what the harness does with prompts, pickling included; put into another
    string it is plain text, which the adapter recognizes by its `OPENING` characters.

    head: the ids up to the start of the assistant's turn. begun: the text that this
    turn starts with, empty for most.
    """

    head: tuple[int, ...]
    begun: str

    @classmethod
    def of(
        cls, chat: ChatFormat, history: Sequence[Mapping[str, str]], *, answers: bool = True
    ) -> ChatPrompt:
        """From [{"role", "content"}]; unless the model `answers` it, it continues the
        last message, the assistant's.

        Raises LrkvError as `conversation_from` and `ChatFormat.prompt` do.
        """
        turns, begun = list(history), ""
        if not answers and turns and turns[-1]["role"] == "assistant":
            begun = turns.pop()["content"]
        conversation = conversation_from(turns)
        prompt = cls(chat.shown(conversation) + begun)
        prompt.head, prompt.begun = tuple(chat.prompt(conversation)), begun
        return prompt
