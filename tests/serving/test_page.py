"""The page in a real browser: a person writes, reads as it comes, stops, edits, and reloads."""

import contextlib
import json
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from support.browser import browsing, chromium
from support.hand_built import a_run
from support.served import post, random_run, served, serving, slow
from support.variants import random_params

from lrkv_jax.data.chat_template import ChatTemplate

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this machine"),
]
# What the conversation has, and what is seen of it.
SAID = "current.turns.flatMap((turn) => [turn.question, turn.answer])"
SEEN = "[...document.querySelectorAll('.text')].map((text) => text.textContent)"
NOTE = "[...document.querySelectorAll('.turn small')].at(-1)?.textContent"
WRONG = "document.querySelector('.error:not([hidden])')?.textContent"
ENDED = f"$('go').textContent === 'Send' && ({NOTE} || {WRONG})"
TITLES = "[...document.querySelectorAll('#list .open')].map((one) => one.textContent)"
SHORT, LONG = ({"temperature": 0, "tokens": tokens} for tokens in (20, 200))


@pytest.fixture
def tiny(tmp_path):
    """A chatting service, its port, and the page that it shows."""
    service = served(random_run())
    with serving(service) as port, browsing(f"http://127.0.0.1:{port}/", tmp_path) as page:
        page.until("document.title === 'tiny'")
        yield service, port, page


def ask(page, text, *, until=ENDED, **fields):
    """Set fields, ask, and return all that was said once it is true."""
    for name, value in fields.items():
        page.value(f"$('{name}').value = {json.dumps(value)}")
        page.value(f"$('{name}').dispatchEvent(new Event('change'))")
    page.value("$('text').focus()")
    page.type(text)
    page.until(until)
    return page.value(SAID)


def click(page, element, number=0):
    page.value(f"document.querySelectorAll({json.dumps(element)})[{number}].click()")


def letters(text):
    """What Markdown keeps of a text."""
    return "".join(filter(str.isalpha, text))


def answered(port, *said, tokens, system=""):
    """The greedy answer of so many tokens to the last of what was said, in turns."""
    turns = zip(("system", *("user", "assistant") * 3), (system, *said), strict=False)
    messages = [{"role": role, "content": text} for role, text in turns]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0}
    return post(port, "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]


def test_an_answer_comes_in_pieces_is_stopped_and_outlives_a_reload(tiny, monkeypatch):
    service, port, page = tiny
    first = answered(port, "My fellow", tokens=20)
    assert ask(page, "My fellow", **SHORT) == ["My fellow", first]
    assert page.value(NOTE).startswith("cut off at max new tokens · 20 tokens · ")
    slow(service, monkeypatch)
    ask(page, "And now?", until=f"{NOTE}.startsWith('Waiting for the first token')", **LONG)
    seen = {letters(page.until(f"{SEEN}[3]"))}
    while len(seen) < 3:  # it grows while it is read
        seen.add(letters(page.value(f"{SEEN}[3]")))
    click(page, "#go")
    page.until(f"$('go').textContent === 'Send' && {NOTE}.startsWith('stopped')")
    said, second = page.value(SAID), answered(port, "My fellow", first, "And now?", tokens=200)
    assert all(letters(second).startswith(part) for part in seen)
    assert second.startswith(said[3]) and said[3] != second
    ask(page, "More?", until=f"{SAID}[5]", **SHORT)
    page.reload()
    monkeypatch.undo()
    page.until(f"document.title === 'tiny' && {SAID}.length === 6")
    assert page.value(SAID)[:4] == said and page.value(WRONG).startswith("Unfinished")
    click(page, ".again")
    page.until(f"{ENDED} && !{WRONG}")
    assert page.value(SAID)[5] == answered(port, *said, "More?", tokens=20)


def test_a_question_is_edited_its_answer_is_drawn_again_and_the_system_prompt_is_sent(tiny):
    service, port, page = tiny
    for text in ("My fellow", "Second", "Third"):
        said = ask(page, text, system="Be brief.", **SHORT)
    first = answered(port, "My fellow", tokens=20, system="Be brief.")
    assert said[:2] == ["My fellow", first]
    page.value("current.turns[2].answer = ''")
    click(page, ".again")
    page.until(ENDED)
    assert page.value(SAID) == said, "a greedy answer is the same again"

    click(page, ".edit-it", 1)
    page.value("document.querySelector('.edit textarea').value = ''")
    page.type("Instead")
    page.until(f"{SAID}.length === 4 && {ENDED}")
    second = answered(port, "My fellow", first, "Instead", tokens=20, system="Be brief.")
    assert page.value(SAID) == ["My fellow", first, "Instead", second]

    template = "{% for one in messages if one.role != 'system' %}{{ one.content }}{% endfor %}"
    service.chat.template = ChatTemplate("it", template, {}, ())
    page.reload()
    page.until("document.title === 'tiny' && $('system').disabled")
    assert "no system role" in page.value("$('system_hint').textContent")
    assert page.value("messages(current)[0].role") == "user"


def test_conversations_are_listed_switched_between_and_deleted(tiny, monkeypatch):
    service, _, page = tiny
    slow(service, monkeypatch)
    begun = ask(page, "My fellow", until=f"{SAID}[1]", **LONG)[1]
    click(page, "#new")  # while the answer comes
    assert page.value(SAID) == [] and page.value("$('go').textContent") == "Send"
    monkeypatch.undo()
    said = ask(page, "And now?\nSoon?", **SHORT)  # what the first one still gets is not here
    assert said[0] == "And now?\nSoon?" and len(said) == 2
    assert page.value(TITLES) == ["And now?", "My fellow"]
    click(page, "#list .open", 1)
    said = page.value(SAID)
    assert said[0] == "My fellow" and said[1].startswith(begun) and len(said) == 2
    assert ask(page, "Go on")[:2] == said and page.value(TITLES) == ["My fellow", "And now?"]
    page.value("confirm = () => true")
    click(page, "#list .discard")
    assert page.value(SAID) == [] and page.value(TITLES) == ["And now?"]
    page.value("for (let n = 0; n < 60; n++) save({ key: `lrkv.chat.${n}`, turns: [{}] })")
    assert page.value("conversations().length") == 50


def test_questions_beyond_the_context_leave_out_the_oldest_turns_and_say_so(tiny):
    _, port, page = tiny
    for number in range(6):
        said = ask(page, f"Question {number}", temperature=0)
        assert "64 tokens" in page.value(NOTE), "a quarter of the context"
        assert page.value("$('used').textContent") == f"{page.value("$('meter').value")} of 256"
    shown = "[...document.querySelectorAll('.full, .full ~ .user .text')].map((at) => at.innerText)"
    line, *seen = page.value(shown)
    assert line.startswith("The context of 256 tokens is full")
    # The model is asked with just what is below the line.
    assert seen == said[6::2] and said[11] == answered(port, *said[6:11], tokens=64)
    ask(page, "We " * 300)  # what no room can be made for takes none
    assert page.value(WRONG).startswith("This question alone fills the context of 256 tokens")


def test_a_question_outlives_the_server_and_another_kind_of_model_has_other_ones(
    tmp_path, monkeypatch
):
    config = random_run().config.model.model_copy(update={"vocabulary": 4096})
    plain = a_run(config, random_params(config, 3), context=256)
    plain, service = served(plain, "plain"), served(random_run())
    with contextlib.ExitStack() as pages, contextlib.ExitStack() as server:
        port = server.enter_context(serving(service, drain=0))
        page = pages.enter_context(browsing(f"http://127.0.0.1:{port}/", tmp_path))
        page.until("document.title === 'tiny'")
        slow(service, monkeypatch)
        begun = ask(page, "My fellow", until=f"{SAID}[1]", **LONG)[1]
        server.close()  # streams are cut
        page.until(ENDED)
        gone, (question, answer) = "The server is unreachable.", page.value(SAID)
        assert question == "My fellow" and answer.startswith(begun)
        assert page.value(WRONG).startswith(f"{gone} Your question is kept")
        assert page.value("$('state').textContent") == f"{gone} Reconnecting …"
        server.enter_context(serving(served(random_run()), "secret", port=port, drain=0))
        page.until("!$('keyed').hidden")
        page.value("$('key').value = 'secret'; $('key').dispatchEvent(new Event('change'))")
        page.until("$('keyed').hidden")
        assert page.value(WRONG).endswith("It is back: send the question again.")
        click(page, ".again")
        page.until(f"{ENDED} && !{WRONG}")
        server.close()

        server.enter_context(serving(plain, port=port))
        ask(page, "We are", until="$('state').textContent.includes('another kind of model')")
        assert page.value(SAID) == [] and page.value("$('text').value") == "We are"
        said = ask(page, "", **SHORT)
        body = {"prompt": "We are", "max_tokens": 20, "temperature": 0}
        reply = post(port, "/v1/completions", body)[1]
        assert said == ["We are", reply["choices"][0]["text"]] == page.value(SEEN)
        ask(page, "We " * 99, **LONG)  # 100 tokens or more, so fewer than 200 follow
        assert page.value(NOTE).startswith("the context is full · ")
        assert page.value(TITLES) == ["We are"]


MARKDOWN = Path(__file__).with_name("sample.md").read_text()
TURN = {"question": "<b>", "state": "done", "note": "note", "prompt": 9, "fresh": 9, "exact": True}


def show(page, *turns, **more):
    turns = [{**TURN, **turn} for turn in turns]
    page.value(f"show({json.dumps({'key': 'lrkv.chat.it', 'from': 0, 'turns': turns, **more})})")


def shape(html):
    """Text and elements, without plain containers, attributes and space."""
    elements = re.sub(r"<(/?)(\w+)[^>]*>", r"<\1\2>", html.replace("s>", "del>"))
    return unescape(re.sub(r"</?(p|div|hr)>|\s", "", elements))


def test_markdown_is_that_of_markdown_it_and_hostile_text_stays_text(tiny):
    page = tiny[2]
    show(page, {"answer": MARKDOWN})
    page.value("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    click(page, ".code button")
    assert page.value("copied") == 'x = "**"\n\n\ny = 1'
    click(page, ".assistant .actions button")
    assert page.value("copied") == MARKDOWN
    page.value("document.querySelectorAll('.code > div').forEach((head) => head.remove())")
    expected = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    shown = page.value("document.querySelector('.assistant .text').innerHTML")
    assert shape(shown) == shape(expected.render(MARKDOWN))
    page.value("document.body.append(make('script', '', 'window.ran = true'))")
    assert page.value("window.ran") is None, "no script runs but the page's"

    page.value("const drawn = make('div'); let text = ''")
    for text in ("<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "![", "]("):
        page.value(f"text = {json.dumps(text)}.repeat(20000); render(drawn, [text])")
        assert page.value("drawn.textContent === text && drawn.firstChild.children.length === 0")
    for text in ("*a **b ", "`a``b", "~~a_b", "> ", "- - a\n", "|-\n", "http://.", "1. ", "```\n"):
        page.value(f"text = {json.dumps(text)}.repeat(200000 / {len(text)})")
        page.value("window.began = performance.now(); render(drawn, text.split('\\n'))")
        assert page.value("performance.now() - began") < 10_000, text
        drawn, whole = map(letters, page.value("[drawn.textContent, text]"))
        assert drawn.startswith(whole), text


# Each element that shows text, its color, and the color behind it.
COLORS = """[...document.querySelectorAll("body :not(script)")].filter((at) =>
  at.checkVisibility({ visibilityProperty: true }) &&
  (at.placeholder || [...at.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
).map((at) => {
  const { color, opacity } = getComputedStyle(at, at.placeholder ? "::placeholder" : null);
  let below = at;
  const behind = () => getComputedStyle(below).backgroundColor;
  while (behind() === "rgba(0, 0, 0, 0)") below = below.parentElement;
  return [at.outerHTML.slice(0, 80), opacity === "1" ? color : "translucent", behind()];
})"""


def luminance(color):
    """WCAG's, of an opaque color."""
    srgb = np.array(re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", color).groups(), float) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722] + 0.05


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_all_text_has_contrast_and_fits_a_phone(scheme, width, tiny):
    page = tiny[2]
    scheme = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", features=[scheme])
    screen = {"height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.call("Emulation.setDeviceMetricsOverride", width=width, **screen)
    gone = {"answer": f"`{'x' * 999}`\n```\n{'x' * 999}", "state": "gone", "error": "Gone."}
    show(page, {"answer": MARKDOWN}, gone, gone, **{"from": 1}, system="S" * 400)
    page.value("say('Gone.', true); $('keyed').hidden = false; edit(current.turns[2])")
    for opened in ("settings", "side"):
        page.value(f"$('{opened}').showPopover()")
        colors = page.value(COLORS)
        ratios = {at: luminance(color) / luminance(behind) for at, color, behind in colors}
        assert not {at: ratio for at, ratio in ratios.items() if 1 / 4.5 < ratio < 4.5}
        assert len(colors) > 50
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert page.value(f"{fits} && $('turns').scrollWidth <= $('turns').clientWidth")
