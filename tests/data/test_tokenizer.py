"""Promises of the tokenizers, ours and trained ones, against the bytes of the text."""

import gzip
import hashlib
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from lrkv_jax.cli import app
from lrkv_jax.data.assets import read_asset
from lrkv_jax.data.sources import documents
from lrkv_jax.data.tokenizer import GPT2_VOCABULARY, load_tokenizer
from lrkv_jax.data.train_tokenizer import SMALLEST, SPECIAL_TOKENS, train_tokenizer, up_to
from lrkv_jax.errors import LrkvError

GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
NAMES = ("sotu-4096", "gpt2")
SPECIALS = ("<|bos|>", "<|endoftext|>", "<s>")
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
spiked = st.lists(st.sampled_from([*SPECIALS, " ", "a", "\n", "é", "日", "'s"])).map("".join)


def write_tokenizer(path, *, special="<|bos|>", change=lambda definition: None):
    """A tiny byte-level tokenizer.json at `path`, with `change` made to its definition."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[special], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    definition = json.loads(tokenizer.to_str())
    change(definition)
    path.write_text(json.dumps(definition))
    return str(path)


@pytest.fixture(scope="module")
def own_path(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("own") / "tokenizer.json")


@pytest.mark.parametrize("name", [*NAMES, "a file"])
@given(text=texts | spiked)
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips_and_its_bytes_are_counted(own_path, name, text):
    tokenizer = load_tokenizer(name if name in NAMES else own_path)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.bos not in ids


def test_added_text_tokens_keep_their_ids_and_bytes(tmp_path):
    added = []

    def add(definition):
        free = len(definition["model"]["vocab"])
        spaces = definition["added_tokens"][0] | {"id": free, "content": "    ", "special": False}
        definition["added_tokens"].append(spaces)
        added.append(free)

    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.json", change=add))
    ids = tokenizer.encode("a    b")
    assert added[0] in ids and tokenizer.token_bytes[added[0]] == 4
    assert tokenizer.decode(ids) == "a    b"


def test_bytes_of_special_and_unused_ids_are_zero():
    gpt2 = load_tokenizer("gpt2")
    assert gpt2.vocabulary == GPT2_VOCABULARY == len(gpt2.token_bytes)
    assert gpt2.bos == 50256
    assert (gpt2.token_bytes[50256:] == 0).all() and (gpt2.token_bytes[:50256] > 0).all()
    sotu = load_tokenizer("sotu-4096")
    assert (sotu.vocabulary, sotu.bos, sotu.token_bytes[0]) == (4096, 0, 0)
    assert (sotu.token_bytes[1:] > 0).all()
    # A larger model's own ids stand for no bytes.
    padded = sotu.token_bytes_up_to(4100)
    assert padded.shape == (4100,) and not padded[4096:].any()
    np.testing.assert_array_equal(padded[:4096], sotu.token_bytes)
    ids = sotu.encode("The state of the Union")
    assert sotu.decode([*ids, 4099, -1, -4099]) == "The state of the Union"


def test_gpt2_matches_the_reference_merges_in_another_library():
    merges = gzip.decompress(read_asset("gpt2.bpe.gz"))
    assert hashlib.sha256(merges).hexdigest() == GPT2_SHA256
    pairs = [tuple(line.split(" ")) for line in merges.decode().split("\n")[1:-1]]
    # The same byte order as GPT-2's encoder.py: printable first, then the stand-ins.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(p) for p in pairs)])}
    reference = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = next(documents("sotu", "heldout"))[:20_000] + " naïve  café's 日本 \t\n 123"
    assert load_tokenizer("gpt2").encode(text).tolist() == reference.encode(text).ids


def test_fingerprint_tells_tokenizers_apart(own_path, tmp_path):
    other = write_tokenizer(tmp_path / "t.json", special="<s>")
    found = [load_tokenizer(name) for name in (*NAMES, own_path, other)]
    assert len({tokenizer.fingerprint for tokenizer in found}) == 4
    assert found[2].bos == found[3].bos == 0, "the first known name"


def test_gpt2_takes_any_length_of_space():
    tokenizer = load_tokenizer("gpt2")
    text = "a" + " " * 1_000_000 + "b"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    first, _, last = tokenizer.encode_batch(["before", text, "after"])
    assert (tokenizer.decode(first), tokenizer.decode(last)) == ("before", "after")


def before_byte_level(step):
    def change(definition):
        steps = [step, definition["pre_tokenizer"]]
        definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}

    return change


def drop_byte(definition):
    removed = definition["model"]["vocab"].pop("Ā")
    definition["model"]["vocab"]["unused"] = removed


def word_pieces(definition):
    how = {"unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
    definition["model"] = {"type": "WordPiece", "vocab": {"?": 0}, **how}


LOSES_TEXT = [
    {"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *(({"change": before_byte_level(s)}, "does not give text back") for s in LOSES_TEXT),
        ({"change": drop_byte}, "lacks 1 of the 256 bytes"),
        ({"change": word_pieces}, "lacks 2.. of the 256 bytes"),
        ({"change": lambda d: d.update(pre_tokenizer=None)}, "ByteLevel"),
        ({"change": lambda d: d.update(normalizer={"type": "Lowercase"})}, "does not give text"),
        ({"special": "[CLS]"}, r"<\|bos\|> or"),
    ],
)
def test_a_file_that_cannot_hold_any_text_is_refused(tmp_path, how, message):
    with pytest.raises(LrkvError, match=message):
        load_tokenizer(write_tokenizer(tmp_path / "t.json", **how))


def test_what_is_no_tokenizer_is_refused_with_the_known_names(tmp_path):
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(LrkvError, match="not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "t.json"))
    for name in ("gtp2", "gtp2" * 2000, "gtp2\0"):
        with pytest.raises(LrkvError, match="gtp2.*sotu-4096, gpt2"):
            load_tokenizer(name)


SIZE = 600


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(up_to(documents("sotu", "train"), 100_000), SIZE))
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
    # The same text gives the same file.
    assert train_tokenizer(up_to(documents("sotu", "train"), 100_000), SIZE) == path.read_text()
    assert all(len(tokenizer.decode([i])) <= 3 for i in tokenizer.encode("123456"))
    # Learnt merges are used: English takes fewer than one token a byte.
    assert len(tokenizer.encode("the American people of the United States")) < 25


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(LrkvError, match=f"too small .*use {SMALLEST} or more"):
        train_tokenizer(["text"], SMALLEST - 1)
    with pytest.raises(LrkvError, match="of 1000000000000 is too large: use 16777216 or less"):
        train_tokenizer(["text"], 10**12)  # with which the library ended the process
    with pytest.raises(LrkvError, match="has merges for a vocabulary of 2[67].*, not 5000"):
        train_tokenizer(["some text"], 5000)


def test_the_command_writes_it_and_measures_it(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(up_to(documents("sotu", "train"), 100_000)):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    out = str(tmp_path / "tokenizer.json")
    arguments = [str(tmp_path / "texts"), "--vocabulary", "400", "--heldout", "0.5", "--out", out]
    app(["tokenizer", "train", *arguments], standalone_mode=False)
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: 400 entries, ") and "bytes per token on held-out text" in said
    assert 1 < float(said.split(", ")[1].split()[0]) < 4
    assert load_tokenizer(out).vocabulary == 400
