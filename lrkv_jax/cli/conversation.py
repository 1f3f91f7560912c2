"""The terminal's side of a chat: reading lines, and answers as they come."""

import contextlib

from rich.console import Console
from rich.text import Text

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.chat import Chat

STYLES = {"text": "", "python": "cyan", "output": "bold cyan"}


def converse(chat: Chat, console: Console) -> None:
    """Talk until the user leaves. Mistakes are reported, and the chat continues."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then knows the arrow keys
    config = chat.run.config
    console.print(
        f"{config.directory}, step {chat.run.step}: {config.model.attention.kind}, context of "
        f"{chat.context} tokens. /reset starts a new conversation, /quit ends; Ctrl-C stops an "
        "answer."
    )
    while True:
        try:
            line = console.input(Text("you> ", style="bold"))
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            chat.reset()
            console.print("a new conversation", style="dim")
        elif line.strip():
            _answer(chat, line, console)


def _answer(chat: Chat, text: str, console: Console) -> None:
    deltas = chat.say(text)
    kind = "text"
    try:
        for delta in deltas:
            if delta.kind != kind:
                # A call and what it gives: 27 * 14 = 378
                console.print(Text(" = " if delta.kind == "output" else " "), end="")
                kind = delta.kind
            console.print(Text(delta.text, style=STYLES[delta.kind]), end="", soft_wrap=True)
    except KeyboardInterrupt:
        deltas.close()
        console.print(" …", end="")
    except LrkvError as error:
        console.print(str(error), style="red", end="")
    console.print()
