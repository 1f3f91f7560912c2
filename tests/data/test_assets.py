"""Promises of the files that ship with the package."""

import gzip
import hashlib
import json
import lzma
import shutil

import pytest

from lrkv_jax.data.assets import FOLDER, build, read_asset
from lrkv_jax.data.sources import documents
from lrkv_jax.data.train_tokenizer import train_tokenizer
from lrkv_jax.errors import LrkvError


@pytest.fixture
def folder(tmp_path):
    for name in (*build.ASSETS, "SHA256SUMS"):
        shutil.copy(FOLDER / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", build.ASSETS)
def test_each_asset_is_whole_and_a_corrupt_one_is_named(folder, name):
    assert read_asset(name)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(LrkvError, match=f"{name} is damaged.*reinstall"):
        read_asset(name, folder)


def test_a_missing_asset_an_unlisted_one_and_a_missing_list_are_named(folder):
    (folder / "gpt2.bpe.gz").unlink()
    with pytest.raises(LrkvError, match="gpt2.bpe.gz is missing.*reinstall"):
        read_asset("gpt2.bpe.gz", folder)
    with pytest.raises(LrkvError, match="other.bin is not listed"):
        read_asset("other.bin", folder)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(LrkvError, match="SHA256SUMS is missing"):
        read_asset("gpt2.bpe.gz", folder)


def test_merges_are_gpt2s():
    merges = gzip.decompress(read_asset("gpt2.bpe.gz"))
    assert hashlib.sha256(merges).hexdigest() == build.GPT2_SHA256
    assert "Modified MIT License" in (FOLDER / "gpt2.LICENSE").read_text()


def test_corpus_is_in_date_order_since_1945():
    lines = lzma.decompress(read_asset("sotu.jsonl.xz")).decode().splitlines()
    addresses = [json.loads(line) for line in lines]
    dates = [address["date"] for address in addresses]
    assert dates == sorted(dates) and dates[0] >= "1945"
    assert all(set(a) == {"date", "president", "text"} and a["text"] for a in addresses)


def test_the_tokenizer_is_what_the_training_split_gives():
    how = {"pattern": "gpt2", "special": [build.BOS]}
    trained = train_tokenizer(documents("sotu", "train"), build.VOCABULARY, **how)
    assert trained.encode() == read_asset("sotu-4096.json")


def test_provenance_states_the_checksum():
    packed = read_asset("sotu.jsonl.xz")
    for content in (packed, lzma.decompress(packed)):
        digest = hashlib.sha256(content).hexdigest()
        assert digest in (FOLDER / "sotu.PROVENANCE.md").read_text()


def make_package(root, texts):
    (root / "data" / "speeches").mkdir(parents=True)
    rows = ["fileid,year,date,president_full,sha256"]
    for (fileid, date), text in texts.items():
        (root / "data" / "speeches" / f"{fileid}.txt").write_bytes(text.encode())
        digest = hashlib.sha256(text.encode()).hexdigest()
        rows.append(f"{fileid},{date[:4]},{date},Some One,{digest}")
    (root / "data" / "metadata.csv").write_text("\n".join(rows) + "\n")
    return root


def test_the_corpus_is_rebuilt_faithfully_from_a_package(tmp_path):
    texts = {
        ("b", "1950-01-02"): "Zweite — Rede\r\n",
        ("a", "1949-03-04"): "First.\n\nEnd",
        ("c", "1944-12-31"): "Too early",
    }
    package = make_package(tmp_path / "sotu", texts)
    lines = lzma.decompress(build.pack(build.read_package(package))).decode()
    found = [json.loads(line) for line in lines.splitlines()]
    assert [a["text"] for a in found] == ["First.\n\nEnd", "Zweite — Rede\r\n"]
    assert found[0]["date"] == "1949-03-04" and found[0]["president"] == "Some One"


def test_a_text_that_does_not_match_its_checksum_is_refused(tmp_path):
    package = make_package(tmp_path / "sotu", {("a", "1949-03-04"): "First."})
    (package / "data" / "speeches" / "a.txt").write_text("Other.")
    with pytest.raises(LrkvError, match="a.txt does not match"):
        build.read_package(package)


def test_other_merges_and_other_folders_are_refused(tmp_path):
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(LrkvError, match="is not GPT-2's"):
        build.pack_merges(tmp_path / "vocab.bpe")
    with pytest.raises(LrkvError, match="metadata.csv is missing"):
        build.read_package(tmp_path)


def test_the_second_text_is_the_prose_of_every_third_module(tmp_path):
    long = "A sentence that is long enough.\n" * 12
    (tmp_path / "a.py").write_text(f'"""{long}"""\ndef f():\n    """Too short."""\n')
    (tmp_path / "b.py").write_text(f'"""{long}"""')
    (tmp_path / "c.py").write_text(f'"""{long}"""')
    (tmp_path / "d.py").write_text(f'"""{long}>>> 1"""\nclass C:\n    """{long}"""\n')
    (tmp_path / "_e.py").write_text(f'"""{long}"""')
    found = build.read_docstrings(tmp_path)
    assert [one["module"] for one in found] == ["a", "d"]
    assert [one["text"] for one in found] == [long.strip()] * 2
    ours = lzma.decompress(read_asset("stdlib.jsonl.xz")).decode().splitlines()
    assert len(ours) == 40 and all(">>>" not in line for line in ours)
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (FOLDER / "stdlib.LICENSE").read_text()
