"""The page in a real browser: a person writes, reads as it comes, stops, and reloads."""

import pytest
from support.browser import browsing, chromium
from support.served import idle, late, post, random_run, served, wait_until

from lrkv_jax.serve.server import serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this machine"),
]

SAID = "[...document.querySelectorAll('.turn span')].map((turn) => turn.textContent)"
NOTE = "[...document.querySelectorAll('.turn small')].at(-1)?.textContent"
BUTTON = "document.getElementById('go').textContent"


def answered(port, *said):
    """The greedy answer of 100 tokens to the last of what was said, in turns."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    body = {"messages": messages, "max_tokens": 100, "temperature": 0}
    reply = post(port, "/v1/chat/completions", body)[1]
    return reply["choices"][0]["message"]["content"]


def test_an_answer_comes_in_pieces_is_stopped_and_outlives_a_reload(tmp_path):
    service = served(random_run())
    with serving(service) as port, browsing(f"http://127.0.0.1:{port}/", tmp_path) as page:
        page.until("document.title === 'tiny'")
        page.value("$('temperature').value = 0; $('tokens').value = 100")
        page.type("My fellow")
        page.until(f"{BUTTON} === 'Send' && {NOTE}")
        first = answered(port, "My fellow")
        assert page.value(SAID) == ["My fellow", first]
        assert "length · 100 tokens · " in page.value(NOTE)

        second = answered(port, "My fellow", first, "And now?")
        calls = service.runner.engine.calls
        calls.read, read = late(calls.read)
        page.type("And now?")
        seen = {page.until(f"{SAID}[3]")}
        while len(seen) < 3:  # it grows while it is read
            seen.add(page.value(f"{SAID}[3]"))
        page.value("$('go').click()")
        page.until(f"{BUTTON} === 'Send'")
        calls.read = read
        wait_until(lambda: idle(service))
        said = page.value(SAID)
        assert all(second.startswith(part) for part in (*seen, said[3])) and said[3] != second
        assert page.value(NOTE).startswith("stopped")

        page.reload()
        page.until(f"document.title === 'tiny' && {SAID}.length === 4")
        assert page.value(SAID) == said and page.value("$('tokens').value") == "100"


def test_what_the_server_refuses_is_said_and_a_key_is_asked_for(tmp_path):
    service = served(random_run())
    with (
        serving(service, "secret") as port,
        browsing(f"http://127.0.0.1:{port}/", tmp_path) as page,
    ):
        page.until("!$('keyed').hidden")
        page.value("$('key').value = 'secret'; $('key').dispatchEvent(new Event('change'))")
        page.until("document.title === 'tiny'")
        page.value("$('text').focus()")
        page.type("<b>We</b> " * 200)  # more tokens than a text may have
        page.until(f"document.querySelector('.turn.error') && {BUTTON} === 'Send'")
        asked, answer = page.value(SAID)
        assert asked.startswith("<b>We</b> <b>") and "256" in answer
        assert page.value("document.querySelector('.turn b')") is None, "text is text"
