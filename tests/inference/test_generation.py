"""Files of prompts become files of texts, row by row, whole or not at all."""

import json
from pathlib import Path

import pytest
from support.hand_built import a_run, calling_run, follows

from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.generation import generate_file, streamed

TOKENIZER = load_tokenizer("sotu-4096")


def ours(text):
    """A run that goes on after any ":" with `text`."""
    ids = TOKENIZER.encode(":" + text).tolist()
    return a_run(*follows(TOKENIZER, dict(zip(ids, ids[1:], strict=False))))


def rows(path, *content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(run, source, target, **more):
    how = {"new_tokens": 20, "sampling": Sampling(), "batch": 2}
    return generate_file(run, source, target, **how, **more)


def test_each_prompt_is_continued_in_its_row(tmp_path):
    source = rows(tmp_path / "in", *({"prompt": f"{'a ' * n}:", "n": n} for n in range(5)))
    run, seen = ours(" The people"), []
    cut = generate(run, source, tmp_path / "out", progress=lambda *at: seen.append(at))
    got = read(tmp_path / "out")
    assert [row["n"] for row in got] == list(range(5)) and cut == 0
    assert {row["text"] for row in got} == {" The people"}
    assert seen == [("in", n, 5) for n in range(1, 6)]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_lone_surrogate_and_a_line_separator_lose_no_work(tmp_path):
    """JSON may hold both; the first was an error after the decoding, the second before."""
    prompt = "\ud800 a\u2028b:"
    (tmp_path / "in").write_text('{"prompt": "\\ud800 a\u2028b:"}\n', encoding="utf-8")
    generate(ours(" yes"), tmp_path / "in", tmp_path / "out")
    (line,) = (tmp_path / "out").read_text(encoding="utf-8").strip().split("\n")
    assert json.loads(line) == {"prompt": prompt, "text": " yes"}


def test_texts_that_the_target_does_not_take_are_kept_elsewhere(tmp_path):
    source = rows(tmp_path / "in", {"prompt": ":"})
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
    how = {"new_tokens": 30, "sampling": Sampling()}
    pieces = list(streamed(run, prompts, **how))
    assert "".join(pieces) == "one: naïve\nthe other: naïve\n"
    assert len(pieces) > 5 and "\ufffd" not in "".join(pieces)


def test_messages_are_answered_in_a_chat(tmp_path):
    message = {"messages": [{"role": "user", "content": "How much?"}]}
    source = rows(tmp_path / "in", message)
    generate(calling_run(), source, tmp_path / "out")
    assert read(tmp_path / "out") == [{**message, "text": "<<4*5=20>>."}]


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
