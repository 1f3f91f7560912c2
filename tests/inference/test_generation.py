"""Files of prompts, and chats: each text is its prompt's, whole, and mistakes cost nothing."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.hand_built import a_run, calling_run, follows, language_model, says
from support.variants import random_params

from lrkv_jax.cli.runs import converse
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import conversation_from
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Sampling, programs
from lrkv_jax.inference.chat import Chat
from lrkv_jax.inference.generation import generate_file, streamed
from lrkv_jax.inference.language_model import Draws

TOKENIZER = load_tokenizer("sotu-4096")


def ours(text):
    """A run that goes on after any ":" with `text`."""
    ids = TOKENIZER.encode(":" + text).tolist()
    return a_run(*follows(TOKENIZER, dict(zip(ids, ids[1:], strict=False))), chats=True)


def rows(path, *content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(run, source, target, **more):
    how = {"max_new_tokens": 20, "sampling": Sampling(), "batch": 2}
    return generate_file(run, source, target, **how, **more)


def test_each_prompt_is_continued_in_its_row(tmp_path):
    """A lone surrogate and a line separator, which JSON may hold, lose no work."""
    odd = "\ud800 a\u2028b:"
    content = [json.dumps({"prompt": f"{'a ' * n}:", "n": n}) for n in range(4)]
    content.append('{"prompt": "\\ud800 a\u2028b:", "n": 4}')
    (tmp_path / "in").write_text("\n".join(content), encoding="utf-8")
    run, seen = ours(" The people"), []
    cut = generate(run, tmp_path / "in", tmp_path / "out", progress=lambda *at: seen.append(at))
    lines = (tmp_path / "out").read_text(encoding="utf-8").strip().split("\n")
    got = [json.loads(line) for line in lines]
    assert [row["n"] for row in got] == list(range(5)) and cut == 0 and got[4]["prompt"] == odd
    assert {row["text"] for row in got} == {" The people"}
    assert seen == [("in", n, 5) for n in range(1, 6)]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_texts_that_the_target_does_not_take_are_kept_elsewhere(tmp_path):
    source = rows(tmp_path / "in", {"prompt": ":", "messages": None})
    (tmp_path / "out").symlink_to("/dev/full")
    with pytest.raises(LrkvError, match="No space left on device.: the texts are in ") as error:
        generate(ours(" yes"), source, tmp_path / "out")
    spare = Path(str(error.value).rpartition(" in ")[2])
    assert read(spare)[0]["text"] == " yes"
    spare.unlink()


def test_texts_come_in_pieces_and_whole_characters():
    """The engine's own texts, the first one while it is decoded."""
    run = ours(" naïve")
    prompts = ["one:", "the other:"]
    # As long as a text of `generate`, so that the same programs serve it.
    pieces = list(streamed(run, prompts, max_new_tokens=130, sampling=Sampling()))
    assert "".join(pieces) == "one: naïve\nthe other: naïve\n"
    assert len(pieces) > 5 and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("{\n", "in:1: not a JSON object"),
        ('{"text": "a"}\n', 'in:1: give {"prompt"'),
        ('{"prompt": ":"}\n{"messages": [{"role": "user", "content": "a"}]}\n', "a file for each"),
        ('{"messages": [{"role": "pope", "content": "a"}]}\n', "in:1: message 1 has role 'pope'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_leaves_what_was_there(tmp_path, content, message):
    (tmp_path / "in").write_text(content)
    (tmp_path / "out").write_text("before")
    with pytest.raises(LrkvError, match=message):
        generate(ours(" a"), tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("target", ["none/out", "folder"])
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_decoded(tmp_path, target):
    source = rows(tmp_path / "in", {"prompt": ":"})
    (tmp_path / "folder").mkdir()
    with pytest.raises(LrkvError, match=f"{target} cannot be written"):
        generate(ours(" a"), source, tmp_path / target, progress=pytest.fail)


FORMAT = ChatFormat(TOKENIZER)
IDS = FORMAT.ids
RANDOM = calling_run().config.model


def random_run():
    # A head that says no frame: the texts then go on to their budget.
    params = random_params(RANDOM, 1)
    head = params["head"]["kernel"].at[:, 4096:].set(0).at[:, 0].set(0)
    return a_run(RANDOM, {**params, "head": {"kernel": head}}, context=128)


def heard(chat, text):
    return "".join(chat.say(text))


@pytest.mark.slow
def test_a_second_turn_prefills_its_own_tokens_and_answers_as_if_all_were_read(monkeypatch):
    chat = Chat(random_run(), sampling=Sampling(), max_new_tokens=9)
    first = heard(chat, "What is the state of the Union?")
    filled = []
    run = chat._engine.calls.run

    def watched(program, *arguments, **static):
        if program is programs.prefill:
            filled.append(int(arguments[2][0]))
        return run(program, *arguments, **static)

    monkeypatch.setattr(chat._engine.calls, "run", watched)
    before = chat.used
    second = heard(chat, "And of the economy?")
    turn = FORMAT.turn("And of the economy?")
    assert filled == [before - 1], "one call, from the last token on"
    # The first answer was cut: its end comes with the next turn.
    assert chat.used == before + 1 + len(turn) + 9
    model = language_model(TOKENIZER, (RANDOM, random_run().params), batch=1, context=127)
    asked = [TOKENIZER.bos, *FORMAT.turn("What is the state of the Union?")]
    ((one,),) = model.answers([asked], 9, Draws())
    ((other,),) = model.answers([[*asked, *one.ids, IDS.assistant_end, *turn]], 9, Draws())
    assert (first, second) == (one.text(FORMAT), other.text(FORMAT))
    roles = ["user", "assistant", "user", "assistant"]
    assert [message["role"] for message in chat.messages] == roles
    assert chat.messages[3]["content"] == second


@pytest.mark.slow
def test_calls_are_answered_and_written_as_in_the_data(tmp_path):
    message = {"messages": [{"role": "user", "content": "How much?"}]}
    generate(calling_run(), rows(tmp_path / "in", message), tmp_path / "out")
    assert read(tmp_path / "out") == [{**message, "text": "<<4*5=20>>."}]
    chat = Chat(calling_run(), sampling=Sampling(), max_new_tokens=20)
    for _ in range(2):
        assert heard(chat, "How much?") == chat.messages[-1]["content"] == "<<4*5=20>>."


@pytest.mark.slow
def test_what_cannot_be_said_or_is_stopped_costs_no_other_turn():
    chat = Chat(random_run(), sampling=Sampling(), max_new_tokens=20)
    first = heard(chat, "Hello")
    said, used = list(chat.messages), chat.used
    for text, message in (("word " * 120, "is full .* /reset"), (" ", "message is empty")):
        with pytest.raises(LrkvError, match=message):
            heard(chat, text)
    chat.max_new_tokens = 0
    with pytest.raises(LrkvError, match="max_new_tokens = 0"):
        heard(chat, "Hello")
    chat.max_new_tokens = 20
    assert chat.messages == said and chat.used == used
    chat.reset()
    assert chat.used == 0 and heard(chat, "Hello") == first
    run = random_run()
    few = run.config.model_copy(update={"model": RANDOM.model_copy(update={"vocabulary": 4096})})
    with pytest.raises(LrkvError, match="no ids for the chat's tokens"):
        Chat(replace(run, config=few), sampling=Sampling())

    # An answer that is stopped is kept as far as it came.
    pieces = chat.say("Go on")
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"] == begun
    heard(chat, "Hello")
    assert len(chat.messages) == 6


def test_a_character_of_several_tokens_comes_whole():
    chat = Chat(a_run(*says(TOKENIZER, "日")), sampling=Sampling())
    assert list(chat.say("How?")) == ["日"]


def test_an_answer_that_ends_as_a_text_does_has_a_turns_end_in_the_conversation():
    (dot,) = TOKENIZER.encode(".").tolist()
    chat = Chat(a_run(*follows(TOKENIZER, {IDS.assistant_start: dot})), sampling=Sampling())
    assert [heard(chat, "How?") for _ in range(2)] == [".", "."]  # and BOS follows it
    first = FORMAT.render(conversation_from(chat.messages[:2]))[0].tolist()
    assert chat._sequence.tokens[: len(first)] == first


def test_the_terminal_talks_and_survives_mistakes(monkeypatch):
    lines = iter(["How \ud800 much?", "", "We the people " * 999, "How much?", "/reset", "/quit"])
    out = io.StringIO()
    console = Console(file=out, width=300, highlight=False)
    monkeypatch.setattr(console, "input", lambda prompt: next(lines))
    chat = Chat(calling_run(), sampling=Sampling(), max_new_tokens=20)
    converse(chat, console)
    printed = out.getvalue()
    assert printed.count("<<4*5=20>>.") == 2 and "/reset starts anew" in printed
    assert chat.messages == [] and next(lines, "none") == "none"
