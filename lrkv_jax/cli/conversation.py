"""The terminal's side of a chat: reading lines, commands, and answers as they come."""

import contextlib
import dataclasses

from rich.console import Console
from rich.text import Text

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.chat import Chat

HELP = (
    "/reset forgets the conversation, /save FILE writes it, /set KEY=VALUE changes temperature, "
    "top_k, top_p or tokens, /quit ends (so does Ctrl-D); Ctrl-C stops an answer"
)
STYLES = {"text": "", "python": "cyan", "output": "bold cyan"}


def converse(chat: Chat, console: Console) -> None:
    """Talk until the user leaves. Mistakes are reported, and the chat continues."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then knows the arrow keys
    config = chat.run.config
    console.print(
        f"{config.directory}, step {chat.run.step}: {config.model.attention.kind}, context of "
        f"{chat.context} tokens. /help lists what you can do."
    )
    while True:
        try:
            line = console.input(Text("you> ", style="bold"))
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not line.strip():
            continue
        if line.strip() in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                console.print(_command(chat, line.strip()), style="dim")
            else:
                _answer(chat, line, console)
        except LrkvError as error:
            console.print(str(error), style="red")


def _answer(chat: Chat, text: str, console: Console) -> None:
    pieces = chat.say(text)
    kind = "text"
    try:
        for piece in pieces:
            if piece.kind != kind:
                # A call and what it gives: 27 * 14 = 378
                console.print(Text(" = " if piece.kind == "output" else " "), end="")
                kind = piece.kind
            console.print(Text(piece.text, style=STYLES[piece.kind]), end="", soft_wrap=True)
    except KeyboardInterrupt:
        pieces.close()
        console.print(" …", end="")
    console.print()


def _command(chat: Chat, line: str) -> str:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/reset":
        chat.reset()
        return "a new conversation"
    if name == "/save":
        if not rest:
            raise LrkvError("/save needs a file: /save chat.json")
        chat.save(rest)
        return f"saved to {rest}"
    if name == "/set":
        return _set(chat, rest)
    if name == "/help":
        return HELP
    raise LrkvError(f"{name} is unknown: {HELP}")


def _set(chat: Chat, text: str) -> str:
    key, _, value = text.partition("=")
    kinds = {"temperature": float, "top_k": int, "top_p": float, "tokens": int}
    try:
        number = kinds[key.strip()](value)
    except (KeyError, ValueError):
        raise LrkvError(f"/set {text}: write one of {', '.join(kinds)} = a number") from None
    if key.strip() == "tokens":
        if number < 1:
            raise LrkvError(f"/set tokens={number}: use 1 or more")
        chat.new_tokens = number
    else:
        chat.sampling = dataclasses.replace(chat.sampling, **{key.strip(): number})
    return f"{key.strip()} = {number}"
