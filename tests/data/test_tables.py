"""Rows of tables: the three kinds of file say the same, and every fault names its place."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrkv_jax.data.tables import Schema, rows, rows_of
from lrkv_jax.errors import LrkvError


class Inner(Schema):
    text: list[str]


class Row(Schema):
    question: str
    answer: int
    choices: Inner


GOOD = [
    {"question": f"q{i} é\n", "answer": i, "choices": {"text": ["a", "b"]}, "extra": 0.5}
    for i in range(3)
]


def write(path, found):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(found), path, row_group_size=2)
        return path
    content = "".join(json.dumps(row) + "\n" for row in found).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture(params=["rows.parquet", "rows.jsonl", "rows.jsonl.gz"])
def path(tmp_path, request):
    return tmp_path / request.param


def test_rows_come_in_order_with_their_places(path):
    got = list(rows(write(path, GOOD), Row))
    assert [place for place, _ in got] == [f"{path}:{n}" for n in (1, 2, 3)]
    assert [row.model_dump() for _, row in got] == [
        {key: value for key, value in row.items() if key != "extra"} for row in GOOD
    ]


def test_places_count_on_through_a_large_file(tmp_path):
    path = write(tmp_path / "x.parquet", [GOOD[0]] * 2500 + [{**GOOD[0], "answer": -1}])
    assert [place for place, row in rows(path, Row) if row.answer == -1] == [f"{path}:2501"]


def test_lines_in_memory_are_rows_too():
    content = b'\xef\xbb\xbf{"text": ["a"]}\n\n{"text": []}'
    got = [(place, row.text) for place, row in rows_of("here", content, Inner)]
    assert got == [("here:1", ["a"]), ("here:3", [])]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"answer": "B"}, r"column 'answer': input should be a valid integer, found 'B' \(str\)"),
        ({"answer": 1.0}, r"column 'answer': .*, found 1.0 \(float\)"),
        ({"question": None}, r"column 'question': .*, found None \(NoneType\)"),
        ({"choices": {"text": [1]}}, r"column 'choices.text.0': .*, found 1 \(int\)"),
        ({"choices": {"label": ["A"]}}, r"no column 'choices.text'"),
    ],
)
def test_a_changed_column_is_named_with_its_row(path, change, line):
    write(path, [{**GOOD[0], **change}])
    with pytest.raises(LrkvError, match=f"{path.name}:1: {line}"):
        list(rows(path, Row))


def test_a_missing_column_is_named_with_what_is_there(path):
    write(path, [{k: v for k, v in row.items() if k != "answer"} for row in GOOD])
    line = r":1: no column 'answer' \(it has question, choices, extra\)"
    with pytest.raises(LrkvError, match=line):
        list(rows(path, Row))


def test_a_long_value_is_shown_in_short(tmp_path):
    write(tmp_path / "x.jsonl", [{"text": "é\n" * 5000}])
    with pytest.raises(LrkvError) as error:
        list(rows(tmp_path / "x.jsonl", Inner))
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ["a"]', "not a JSON object"),
        (b'["a"]', "not a JSON object but a list"),
        (b"null", "not a JSON object but a NoneType"),
        (b'{"text": ["\xff"]}', "not a JSON object .*utf-8"),
        (b'{"text": ["\\ud800"]}', "not a JSON object .*surrogates"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
    ],
)
def test_a_broken_line_is_named(line, reason):
    with pytest.raises(LrkvError, match=f"^here:2: {reason}"):
        list(rows_of("here", b'{"text": []}\n' + line, Inner))


def test_a_broken_row_group_is_named_with_the_last_good_row(tmp_path):
    path = write(tmp_path / "x.parquet", GOOD)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[start : start + 24] = b"\xff" * 24
    path.write_bytes(content)
    with pytest.raises(
        LrkvError,
        match=r"x.parquet is not readable parquet .row group 1 of 2, after row \d: .*fetch",
    ):
        list(rows(path, Row))


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.gz"])
@pytest.mark.parametrize("keep", [0, 20, 60])
def test_a_torn_file_is_named(tmp_path, name, keep):
    path = write(tmp_path / name, GOOD)
    path.write_bytes(path.read_bytes()[:keep])
    if keep == 0 and name == "x.jsonl.gz":
        assert list(rows(path, Row)) == []  # an empty archive is whole; `load` wants rows
        return
    with pytest.raises(LrkvError, match=name):
        list(rows(path, Row))


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(LrkvError, match=r"x.csv is none of .parquet, .jsonl"):
        rows(tmp_path / "x.csv", Row)
    with pytest.raises(LrkvError, match="x.jsonl: cannot be read"):
        list(rows(tmp_path / "x.jsonl", Row))
