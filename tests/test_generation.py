"""Files of prompts become files of texts, row by row, whole or not at all."""

import json

import pytest
from hand_built import a_run, calling_run, follows

from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.decode import Sampling
from lrkv_jax.errors import LrkvError
from lrkv_jax.generation import generate_file

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


def test_each_prompt_is_continued_in_its_row(tmp_path):
    source = rows(tmp_path / "in", *({"prompt": f"{'a ' * n}:", "n": n} for n in range(5)))
    seen = []
    cut = generate_file(
        ours(" The people"), source, tmp_path / "out", new_tokens=9, sampling=Sampling(), batch=2,
        progress=lambda *at: seen.append(at),
    )  # fmt: skip
    got = read(tmp_path / "out")
    assert [row["n"] for row in got] == list(range(5)) and cut == 0
    assert {row["text"] for row in got} == {" The people"}
    assert seen[-1] == ("in", 5, 5) and len(seen) == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_messages_are_answered_in_a_chat(tmp_path):
    message = {"messages": [{"role": "user", "content": "How much?"}]}
    source = rows(tmp_path / "in", message)
    generate_file(calling_run(), source, tmp_path / "out", new_tokens=20, sampling=Sampling())
    assert read(tmp_path / "out") == [{**message, "text": "<<4*5=20>>."}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("{\n", "in:1: not JSON"),
        ('{"text": "a"}\n', 'in:1: give {"prompt"'),
        ('{"prompt": ":"}\n{"messages": [{"role": "user", "content": "a"}]}\n', "a file for each"),
        ('{"messages": [{"role": "pope", "content": "a"}]}\n', "in:1: message 1 has role 'pope'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_leaves_what_was_there(tmp_path, content, message):
    (tmp_path / "in").write_text(content)
    (tmp_path / "out").write_text("before")
    with pytest.raises(LrkvError, match=message):
        generate_file(
            ours(" a"), tmp_path / "in", tmp_path / "out", new_tokens=9, sampling=Sampling()
        )
    assert (tmp_path / "out").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_target_that_cannot_be_written_is_told_before_anything_is_decoded(tmp_path):
    source = rows(tmp_path / "in", {"prompt": ":"})
    with pytest.raises(LrkvError, match="none/out cannot be written"):
        generate_file(
            ours(" a"), source, tmp_path / "none/out", new_tokens=9, sampling=Sampling(),
            progress=pytest.fail,
        )  # fmt: skip
