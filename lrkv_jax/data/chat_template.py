"""An imported model's chat template: Jinja, in the sandbox in which transformers runs it.

https://huggingface.co/docs/transformers/main/chat_templating; the environment is that
of its utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lrkv_jax import files
from lrkv_jax.errors import LrkvError

FILE, SETTINGS, OLD_NAMES = (
    "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip
# The special tokens that a template may name.
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Around a special token that a message spells out; these are no characters.
_START, _END = "\ufdd0", "\ufdd1"


class ChatTemplate:
    """A template, the special tokens that it may name, and those that no message may forge.

    Raises `LrkvError` for a source that is not Jinja.
    """

    def __init__(self, what: str, source: str, named: Mapping[str, str], special: Sequence[str]):
        self.what, self.source, self._named = what, source, dict(named)
        longest_first = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(longest_first or "(?!)")
        self._marked = re.compile(f"{_START}({self._special.pattern}){_END}|[{_START}{_END}]")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise LrkvError(f"{what} is not a template ({error}): fix or delete it") from None

    def render(self, messages: Sequence[Mapping[str, str]], *, answers: bool) -> str:
        """The text of a conversation; with `answers` up to the start of the assistant's answer.

        A special token that a message spells out is marked, for `stretches`. Raises
        `LrkvError` with the template's message for a conversation that it refuses.
        """
        turns = [{key: self._guarded(text) for key, text in turn.items()} for turn in messages]
        try:
            return self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=answers,
                **self._named,
            )  # fmt: skip
        except Exception as error:  # a template runs code, and may raise anything
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise LrkvError(
                f"the model's chat template refuses the conversation ({reason}): ask otherwise"
            ) from None

    def stretches(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """A rendered text in parts, and whether special tokens in them are text of a message."""
        for number, part in enumerate(self._marked.split(rendered)):
            if part:
                yield part, number % 2 == 1

    def plain(self, rendered: str) -> str:
        """A rendered text without marks."""
        return "".join(part for part, _ in self.stretches(rendered))

    def _guarded(self, text: str) -> str:
        text = text.replace(_START, "").replace(_END, "")
        return self._special.sub(f"{_START}\\g<0>{_END}", text)


def template_of(folder: Path, special: Sequence[str]) -> ChatTemplate | None:
    """The template of a model's folder, None where it has none.

    chat_template.jinja comes before tokenizer_config.json, and of several the one that
    is called default. Raises `LrkvError` for one that is not text, or not Jinja.
    """
    settings = files.read_json(folder / SETTINGS, "fetch it again") or {}
    path, source = folder / SETTINGS, settings.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        if "default" not in named:
            raise LrkvError(f"{path} has several chat templates, none named default: name one")
        source = named["default"]
    if (folder / FILE).is_file():
        path = folder / FILE
        try:
            source = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise LrkvError(f"{path} cannot be read as text ({error}): fetch it again") from None
    if source is None:
        return None
    if not isinstance(source, str):
        raise LrkvError(f"{path}: chat_template is no text: fetch it again")
    old = files.read_json(folder / OLD_NAMES, "fetch it again") or {}
    tokens = {name: settings.get(name, old.get(name)) for name in NAMED}
    plain = {n: one.get("content") if isinstance(one, dict) else one for n, one in tokens.items()}
    texts = {name: text for name, text in plain.items() if isinstance(text, str)}
    return ChatTemplate(str(path), source, texts, special)


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}, which marks the assistant's text: no mark here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return made


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's `tojson` filter without its escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
