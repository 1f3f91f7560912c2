"""Promises of reading tables: rows in order, and each fault in one line with its place."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrkv_jax.data.tables import Schema, json_rows, parquet_rows
from lrkv_jax.errors import LrkvError


class Inner(Schema):
    text: list[str]


class Outer(Schema):
    question: str
    answer: int
    choices: Inner


GOOD = [
    {"question": f"q{i} é\n", "answer": i, "choices": {"text": ["a", "b"]}, "extra": 0.5}
    for i in range(3)
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.parquet"


def write(path, found):
    pq.write_table(pa.Table.from_pylist(found), path, row_group_size=1200)
    return path


def test_rows_come_in_order_with_their_places(path):
    found = list(parquet_rows(write(path, GOOD * 900), Outer))
    assert [place for place, _ in found] == [f"{path}:{n}" for n in range(1, 2701)]
    wanted = [{key: value for key, value in row.items() if key != "extra"} for row in GOOD]
    assert [row.model_dump() for _, row in found] == wanted * 900


def test_lines_in_memory_are_rows_too():
    content = b'\xef\xbb\xbf{"text": ["a"]}\n\n{"text": []}'
    found = [(place, row.text) for place, row in json_rows("here", content, Inner)]
    assert found == [("here:1", ["a"]), ("here:3", [])]


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"answer": "B"}, "answer"),
        ({"answer": 1.0}, "answer"),
        ({"question": None}, "question"),
        ({"choices": {"text": [1]}}, "choices.text.0"),
        ({"choices": {"label": ["A"]}}, "choices.text"),
    ],
)
def test_a_changed_column_is_named_with_its_row(path, change, column):
    write(path, [{**GOOD[0], **change}])
    with pytest.raises(LrkvError, match=f"{path.name}:1: column '{column}': "):
        list(parquet_rows(path, Outer))


def test_a_broken_row_group_is_named_with_the_last_good_row(path):
    write(path, GOOD * 900)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[start : start + 24] = b"\xff" * 24
    path.write_bytes(content)
    with pytest.raises(
        LrkvError,
        match=r"rows.parquet is not readable parquet .row group 1 of 3, after row \d+: .*fetch",
    ):
        list(parquet_rows(path, Outer))


@pytest.mark.parametrize("keep", [0, 20, 60])
def test_a_torn_file_is_named(path, keep):
    write(path, GOOD)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(LrkvError, match="rows.parquet is not readable"):
        list(parquet_rows(path, Outer))
