"""Promises of the document sources: nothing lost, nothing in both splits, errors that name."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrkv_jax.data.sources import documents, file_names
from lrkv_jax.errors import LrkvError


def both(source, **options):
    return [list(documents(str(source), split, **options)) for split in ("train", "heldout")]


@pytest.fixture
def mixed(tmp_path):
    """120 documents over three formats and two levels of folders."""
    (tmp_path / "deep").mkdir()
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(f"text {n}")
    rows = "".join(json.dumps({"text": f"json {n}", "id": n}) + "\n" for n in range(40))
    (tmp_path / "deep" / "rows.jsonl").write_text(rows)
    table = pa.table({"id": range(40), "text": [f"parquet {n}" for n in range(40)]})
    pq.write_table(table, tmp_path / "deep" / "rows.parquet", row_group_size=7)
    (tmp_path / "ignored.csv").write_text("text\nno\n")
    return tmp_path


def test_a_linked_folder_is_read_once(mixed, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "a.txt").write_text("linked")
    (mixed / "more").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(mixed)  # would never end
    names = file_names(str(mixed))
    assert len(names) == len(set(names)) == 43 and "more/a.txt" in names


def test_every_document_is_in_exactly_one_split(mixed):
    train, heldout = both(mixed, heldout=0.3)
    everything = [f"{kind} {n}" for kind in ("text", "json", "parquet") for n in range(40)]
    assert sorted(train + heldout) == sorted(everything)
    # 120 draws of 0.3 are 36 ± 5: within four standard deviations.
    assert 16 <= len(heldout) <= 56
    # A document's split does not change when others join.
    (mixed / "00-new.jsonl").write_text("".join(f'{{"text": "new {n}"}}\n' for n in range(30)))
    _, after = both(mixed, heldout=0.3)
    assert [text for text in after if not text.startswith("new")] == heldout


def test_the_last_files_are_held_out_whole_where_some_are(mixed):
    train, heldout = both(mixed, heldout_shards=2)
    assert heldout == [f"{kind} {n}" for kind in ("json", "parquet") for n in range(40)]
    assert train == [f"text {n}" for n in range(40)]


def test_embedded_train_never_contains_a_heldout_document():
    train, heldout = both("sotu")
    assert (len(train), len(heldout)) == (88, 6)
    assert not set(train) & set(heldout)
    # Nor a paragraph of one, courtesies aside.
    paragraphs = {p for text in train for p in text.split("\n\n") if len(p) > 150}
    assert not paragraphs & {p for text in heldout for p in text.split("\n\n")}


def test_line_ends_are_kept_and_empty_documents_and_a_byte_order_mark_are_not(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n{"text": null}\n{"text": "x"}\n')
    (tmp_path / "c.txt").write_bytes("\ufeffone\r\ntwo\n".encode())
    pq.write_table(pa.table({"text": ["", None, "y"]}), tmp_path / "d.parquet")
    assert list(documents(str(tmp_path), "train", heldout=0)) == ["x", "one\r\ntwo\n", "y"]


BAD = {
    "no column": ("a.jsonl", b'{"body": "x", "id": 1}\n', "a.jsonl:1: no column 'text'.*body, id"),
    "not json": ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not a JSON object"),
    "not text": ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1: column 'text' is int"),
    "a huge number": ("a.jsonl", b'{"n": ' + b"1" * 5000 + b"}\n", "a.jsonl:1: not a JSON"),
    "not UTF-8": ("a.txt", b"ab\xff", "a.txt: byte 2 is not UTF-8"),
    "not parquet": ("a.parquet", b"PAR1 nonsense", "a.parquet is not readable parquet"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LrkvError, match=message) as caught:
        list(documents(str(tmp_path), "train", heldout=0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("opens", ["io.open", "os.scandir", "pyarrow.parquet.ParquetFile"])
def test_what_may_not_be_read_is_named(mixed, monkeypatch, opens):
    def refuse(path=None, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(opens, refuse)
        with pytest.raises(LrkvError, match=r"cannot be read \(Permission denied\): change"):
            list(documents(str(mixed), "train"))


def test_names_that_are_not_utf8_are_read(tmp_path):
    deep = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(deep)
    with open(deep + b"/\xfe.txt", "w") as file:
        file.write("text")
    (tmp_path / "a.parquet").mkdir()
    os.mkfifo(tmp_path / "b.txt")
    assert list(documents(str(tmp_path), "train", heldout=1e-9)) == ["text"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data/fineweb-edu", "data/fineweb-edu does not exist: .*parquet.*FineWeb-Edu"),
        (".", "holds nothing to read: put .txt"),
        ("/dev/null", "is a file: give the folder"),
        ("x" * 5000, "cannot be read"),
        ("\ud800", "does not exist"),
    ],
)
def test_a_source_that_holds_no_text_is_one_line(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LrkvError, match=message):
        next(documents(name, "train"))


def test_a_parquet_column_of_any_text_is_read_and_another_refused(tmp_path):
    ids = pa.array([1, 2, 3])
    for kind in (pa.utf8(), pa.large_utf8(), pa.string_view(), pa.dictionary(pa.int8(), pa.utf8())):
        texts = pa.array(["x", "é", "x"]).cast(kind)
        pq.write_table(pa.table({"text": texts, "id": ids}), tmp_path / "a.parquet")
        assert list(documents(str(tmp_path), "train", heldout=0)) == ["x", "é", "x"]
    for column, message in (
        ("words", "no column 'words'.*: text, id"),
        ("id", "column 'id' is int, not text"),
    ):
        with pytest.raises(LrkvError, match=message):
            list(documents(str(tmp_path), "train", text_column=column))


@pytest.mark.parametrize(("heldout", "split"), [(0.0, "heldout"), (1.0, "train")])
def test_a_split_without_documents_is_named(mixed, heldout, split):
    with pytest.raises(LrkvError, match=f"no document in its {split} split.*data.heldout"):
        list(documents(str(mixed), split, heldout=heldout))
