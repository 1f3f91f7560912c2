"""The request schema, field by field: OpenAI's names, and some of ours.

Each class refuses unknown fields. Limits on what a client can make the server hold are here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lrkv_jax.data.conversation import conversation_from, without_empty_answers
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.calls import STOPS
from lrkv_jax.inference.sampling import BIASES, TOPS

MOST_CHOICES = 16
MOST_STOPS, LONGEST_STOP = 16, 256

# Prompts, or ids of one, and turns; what a server has room for is less.
MOST_PROMPTS, MOST_IDS, MOST_TURNS = 4096, 1 << 20, 4096
MOST_FIELDS = 256

Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(fail_fast=True, max_length=MOST_IDS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
BiasedId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


# Fields that change no text, whatever their value: OpenAI's, and vLLM's. There are no tools.
IGNORED = frozenset({
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "user",
    "parallel_tool_calls", "tool_choice", "request_id", "kv_transfer_params",
})  # fmt: skip
# Fields that would change the text, with the value that does not.
NEUTRAL: dict[str, Any] = {
    "best_of": 1, "suffix": "", "echo": False, "tools": [], "response_format": {"type": "text"},
    "length_penalty": 1.0, "use_beam_search": False, "skip_special_tokens": True, "bad_words": [],
}  # fmt: skip


class Body(BaseModel):
    """A body whose unknown fields are errors, and whose types are strict.

    A field that is null is one that is left out.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MOST_FIELDS:  # each unknown one would be a separate error
            raise ValueError(f"{len(body)} fields are more than {MOST_FIELDS}: send those you need")
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(Body):
    """usage: as a last event of the stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # of OpenAI's client; nothing is obfuscated


class GenerationRequest(Body):
    """The fields common to requests for both kinds of text, with OpenAI's defaults."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0  # vLLM's -1 is all tokens, as 0 is
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[BiasedId, Bias] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = []
    stop_token_ids: Annotated[list[Id], Field(max_length=STOPS - 3)] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_no_ops(cls, body: Any) -> Any:
        """The fields that change the text."""
        if not isinstance(body, dict):
            return body
        bias = body.get("logit_bias")
        if isinstance(bias, dict) and len(bias) > BIASES:
            raise ValueError(f"logit_bias has more than {BIASES} ids: give fewer")
        return {
            name: value
            for name, value in body.items()
            if name not in IGNORED
            and not (name in NEUTRAL and value == NEUTRAL[name])
            and not (name == "best_of" and value == body.get("n"))
        }

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(
            self.temperature, max(0, self.top_k), self.top_p, self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty, presence_penalty=self.presence_penalty,
            bias={int(token): value for token, value in self.logit_bias.items()},
        )  # fmt: skip


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MOST_PROMPTS)]
        | Ids
        | Annotated[
            list[Annotated[Ids, Field(min_length=1)]],
            Field(fail_fast=True, max_length=MOST_PROMPTS),
        ]
    )
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=TOPS)] | None = None

    @property
    def most(self) -> int:
        """The most new tokens."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def logprob_count(self) -> int | None:
        """How many of the likeliest tokens to report at each token; None reports nothing."""
        return self.logprobs


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn. `name` is taken, and of no effect."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """The message as a conversation has it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MOST_TURNS)
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOPS)] = 0

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def most(self) -> int | None:
        """The most new tokens."""
        named = self.max_completion_tokens
        return self.max_tokens if named is None else named

    @property
    def logprob_count(self) -> int | None:
        """How many of the likeliest tokens to report at each token; None reports nothing."""
        return self.top_logprobs if self.logprobs else None

    def conversation(self):
        """The turns, but for empty answers, which a server may have given.

        Raises `LrkvError` as `conversation_from` does.
        """
        turns = [message.plain for message in self.messages]
        return conversation_from(without_empty_answers(turns))


class TokenizeRequest(Body):
    """The body of /tokenize, as vLLM has it."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


def read[Kind: Body](kind: type[Kind], body: bytes) -> tuple[Kind | None, str, str]:
    """(the request, or None; what is wrong with it; the field that is wrong)."""
    try:
        return kind.model_validate_json(body), "", ""
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    field = str(errors[0]["loc"][0]) if errors[0]["loc"] else ""
    lines = []
    for one in errors[:4]:
        place = ".".join(map(str, one["loc"]))[:80]
        text = one["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {text}" if place else text)
    return None, "; ".join(lines), field[:80]
