"""The page in a real browser: a person writes, reads as it comes, stops, and reloads."""

import contextlib
import queue
import threading

import pytest
from support.browser import browsing, chromium
from support.hand_built import a_run
from support.served import idle, late, post, random_run, served, wait_until
from support.variants import random_params

from lrkv_jax.serving.server import bound, serve, serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this machine"),
]

SAID = "[...document.querySelectorAll('.turn span')].map((turn) => turn.textContent)"
NOTE = "[...document.querySelectorAll('.turn small')].at(-1)?.textContent"
BUTTON = "document.getElementById('go').textContent"
WRONG = "document.querySelector('.turn.error span')?.textContent"
ANSWERED = f"{BUTTON} === 'Send' && {NOTE}"


@contextlib.contextmanager
def slowly(service):
    """Calls of its engine take a tenth of a second more."""
    calls = service.engine_loop.engine.calls
    calls.read, read = late(calls.read)
    try:
        yield
    finally:
        calls.read = read


@contextlib.contextmanager
def ended_at_once(service, port=0):
    """Serve on this port, which is given; at the end streams are cut."""
    there, ready = bound("127.0.0.1", port, None), queue.SimpleQueue()
    how = {"drain": 0, "ready": ready.put}
    thread = threading.Thread(target=serve, args=(service, there, None), kwargs=how)
    thread.start()
    leave = ready.get(timeout=60)
    try:
        yield there.getsockname()[1]
    finally:
        leave()
        thread.join(60)


def choose(page, tokens):
    """Greedy answers of so many tokens, as set by a person who then writes."""
    for name, value in (("temperature", 0), ("tokens", tokens)):
        page.value(f"$('{name}').value = {value}; $('{name}').dispatchEvent(new Event('change'))")
    page.value("$('text').focus()")


def ask_at_length(page, text):
    """Ask for a long answer, and return the part of it that the page shows once it has begun."""
    choose(page, tokens=200)
    page.type(text)
    return page.until(f"{BUTTON} === 'Stop' && {SAID}[1]")


def answered(port, *said, most=100):
    """The greedy answer of `most` tokens to the last of what was said, in turns."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    body = {"messages": messages, "max_tokens": most, "temperature": 0}
    reply = post(port, "/v1/chat/completions", body)[1]
    return reply["choices"][0]["message"]["content"]


def test_an_answer_comes_in_pieces_is_stopped_and_outlives_a_reload(tmp_path):
    service = served(random_run())
    with serving(service) as port, browsing(f"http://127.0.0.1:{port}/", tmp_path) as page:
        page.until("document.title === 'tiny'")
        choose(page, tokens=100)
        page.type("My fellow")
        page.until(f"{BUTTON} === 'Send' && {NOTE}")
        first = answered(port, "My fellow")
        assert page.value(SAID) == ["My fellow", first]
        assert "length · 100 tokens · " in page.value(NOTE)

        second = answered(port, "My fellow", first, "And now?")
        with slowly(service):
            page.type("And now?")
            seen = {page.until(f"{SAID}[3]")}
            while len(seen) < 3:  # it grows while it is read
                seen.add(page.value(f"{SAID}[3]"))
            page.value("$('go').click()")
            page.until(f"{BUTTON} === 'Send'")
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


def test_new_while_an_answer_streams_keeps_the_conversation_and_the_next_one_works(tmp_path):
    service = served(random_run())
    with serving(service) as port, browsing(f"http://127.0.0.1:{port}/", tmp_path) as page:
        page.until("document.title === 'tiny'")
        with slowly(service):
            seen = ask_at_length(page, "My fellow")
            page.value("$('clear').click()")
            assert page.value(SAID) == [] and page.value(BUTTON) == "Send"
            choose(page, tokens=20)
            page.type("And now?")  # what the first one still gets is no part of it
            page.until(ANSWERED)
        assert page.value(SAID)[0] == "And now?" and len(page.value(SAID)) == 2
        wait_until(lambda: idle(service))

        page.value("$('text').focus()")
        page.type("Again?")
        page.until(f"{BUTTON} === 'Send' && {SAID}.length === 4 && {NOTE}")
        assert "20 tokens" in page.value(NOTE)
        assert page.value("document.querySelector('.turn.error')") is None

        first = page.value("[...$('list').options].find((one) => one.text === 'My fellow').value")
        page.value(f"$('list').value = '{first}'; $('list').dispatchEvent(new Event('change'))")
        said = page.value(SAID)
        assert said[0] == "My fellow" and said[1].startswith(seen) and len(said) == 2
        assert page.value(NOTE).startswith("stopped")
        page.type("Go on")
        page.until(f"{BUTTON} === 'Send' && {SAID}.length === 4 && {NOTE}")
        assert page.value(SAID)[:2] == said

        page.value("confirm = () => true; $('delete').click()")
        options = page.value("[...$('list').options].map((one) => one.text)")
        assert options == ["New conversation", "And now?"]


def assert_kept(page, seen, said):
    """The question and at least what was seen of its answer are there; returns that answer."""
    question, answer, wrong = page.value(SAID)
    assert question == "My fellow" and answer.startswith(seen)
    assert wrong.startswith(said)
    return answer


def test_a_reload_in_mid_answer_keeps_the_question_and_the_text_so_far(tmp_path):
    service = served(random_run())
    with serving(service) as port, browsing(f"http://127.0.0.1:{port}/", tmp_path) as page:
        page.until("document.title === 'tiny'")
        with slowly(service):
            seen = ask_at_length(page, "My fellow")
            page.reload()
        page.until(f"document.title === 'tiny' && {SAID}.length")
        answer = assert_kept(page, seen, "Unfinished")
        wait_until(lambda: idle(service))

        page.value("document.querySelector('.again').click()")
        page.until(ANSWERED)
        said = page.value(SAID)
        assert said[0] == "My fellow" and said[1].startswith(answer) and len(said) == 2


def test_questions_beyond_the_context_leave_out_the_oldest_turns_and_say_so(tmp_path):
    service = served(random_run())
    with serving(service) as port, browsing(f"http://127.0.0.1:{port}/", tmp_path) as page:
        page.until("document.title === 'tiny'")
        assert page.value("$('tokens').value") == "64", "a quarter of the context"
        assert page.value("$('used').textContent") == "0 of 256 tokens"
        page.value("$('temperature').value = 0")
        full = []
        for number in range(6):
            page.type(f"Question {number}")
            page.until(f"{BUTTON} === 'Send' && {SAID}.length === {2 * number + 2} && {NOTE}")
            assert "64 tokens" in page.value(NOTE)
            full.append(page.value("$('meter').value"))
            assert page.value("$('used').textContent") == f"{full[-1]} of 256 tokens"
        assert 64 < full[0] < full[1] < full[2] < 256 and max(full) <= 256
        said, line = page.value(SAID), page.value("document.querySelector('.line').textContent")
        assert line.startswith("The context of 256 tokens is full")
        after = "[...document.querySelectorAll('.line ~ .user span')].map((one) => one.textContent)"
        assert page.value(after) == ["Question 3", "Question 4", "Question 5"]
        # The model is asked with just what is below the line.
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": text}
            for number, text in enumerate(said[6:11])
        ]
        body = {"messages": messages, "max_tokens": 64, "temperature": 0}
        reply = post(port, "/v1/chat/completions", body)[1]
        assert reply["choices"][0]["message"]["content"] == said[11]
        assert reply["usage"]["total_tokens"] == full[-1]

        page.type("We " * 300)  # what no room can be made for takes none
        page.until(f"{BUTTON} === 'Send' && {WRONG}")
        assert page.value(WRONG).startswith("This question alone fills the context of 256 tokens")
        page.value("$('text').value = 'begun'; document.querySelector('.edit').click()")
        assert page.value("$('text').value") == "We " * 300 + "\nbegun"

        page.reload()
        page.until(f"document.title === 'tiny' && {SAID}.length === 12")
        assert page.value("document.querySelector('.line').textContent") == line
        assert page.value(after) == ["Question 3", "Question 4", "Question 5"]


def test_a_question_that_the_servers_end_met_is_kept_and_sent_again_when_it_is_back(tmp_path):
    service = served(random_run())
    with contextlib.ExitStack() as pages, contextlib.ExitStack() as server:
        port = server.enter_context(ended_at_once(service))
        page = pages.enter_context(browsing(f"http://127.0.0.1:{port}/", tmp_path))
        page.until("document.title === 'tiny'")
        with slowly(service):
            seen = ask_at_length(page, "My fellow")
            server.close()
            page.until(f"{BUTTON} === 'Send'")
        assert_kept(page, seen, "The server is gone. Your question is kept")
        assert page.value("$('state').textContent").startswith("The server is gone.")

        page.value("$('clear').click()")
        page.type("And now?")  # while nobody answers
        page.until(f"{BUTTON} === 'Send' && {WRONG}")
        assert page.value(SAID)[0] == "And now?" and "The server is gone." in page.value(WRONG)

        server.enter_context(ended_at_once(served(random_run()), port))
        page.until("$('state').textContent === 'The server is back.'")
        assert page.value(WRONG).endswith("It is back: send the question again.")
        page.value("document.querySelector('.again').click()")
        page.until(ANSWERED)
        assert page.value(SAID) == ["And now?", answered(port, "And now?", most=200)]


def test_a_model_that_continues_text_has_conversations_of_its_own(tmp_path):
    service = served(random_run())
    config = random_run().config.model.model_copy(update={"vocabulary": 4096})
    plain = a_run(config, random_params(config, 3), context=256)
    with contextlib.ExitStack() as pages, contextlib.ExitStack() as server:
        port = server.enter_context(ended_at_once(service))
        page = pages.enter_context(browsing(f"http://127.0.0.1:{port}/", tmp_path))
        page.until("document.title === 'tiny'")
        choose(page, tokens=20)
        page.type("My fellow")
        page.until(ANSWERED)
        server.close()
        server.enter_context(ended_at_once(served(plain, "plain"), port))

        page.type("We are")  # to a server that is another one by now
        page.until("$('state')?.textContent.includes('another kind of model')")
        assert page.value(SAID) == [] and page.value("$('text').value") == "We are"
        page.type("")
        page.until(ANSWERED)
        body = {"prompt": "We are", "max_tokens": 20, "temperature": 0}
        reply = post(port, "/v1/completions", body)[1]
        assert page.value(SAID) == ["We are", reply["choices"][0]["text"]]

        choose(page, tokens=200)
        page.type("We " * 99)  # 100 tokens or more, so fewer than 200 follow
        page.until(f"{SAID}.length === 4 && {ANSWERED}")
        assert page.value("$('used').textContent") == "256 of 256 tokens"
        assert "length · the context is full" in page.value(NOTE)
        assert page.value("[...$('list').options].map((one) => one.text)") == ["We are"]
