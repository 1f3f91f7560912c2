"""Text that comes in pieces is the text that comes at once."""

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lrkv_jax.data.chat import ChatFormat, Writer
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.serving.detokenizer import Detokenizer

PIECES = [b"a", b"b", b"ab", b"ba", b"", "é".encode(), b"\xe6\x97", b"\xa5", b"\xf0\x9f", b"\xff"]


def of(ids, stops=()):
    """(the pieces of a text, the stop that ended it, the ids that were read until then)."""
    detokenizer, pieces, read = Detokenizer(PIECES.__getitem__, stops=stops), [], 0
    for token in ids:
        pieces.append(detokenizer.read(token))
        read += 1
        if detokenizer.stop_string is not None:
            break
        assert detokenizer.emitted == len("".join(pieces)) <= detokenizer.length
    return [*pieces, detokenizer.end()], detokenizer.stop_string, read


@example([0, 6, 0, 0], ["aa"])  # the broken character in between is one
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    st.lists(st.text("ab\ufffdé日", min_size=1, max_size=4), max_size=3),
)
def test_pieces_make_the_whole_up_to_the_stop_that_is_complete_first(ids, stops):
    whole = b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")
    ends = [
        (whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole
    ]
    pieces, stopped, read = of(ids, stops)
    assert "".join(pieces) == (whole[: min(ends)[1]] if ends else whole)
    assert (stopped is None) == (not ends)
    if stopped is not None:
        # Nothing after the id that completed it was needed.
        before = b"".join(PIECES[i] for i in ids[: read - 1])
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(before)
        assert not any(stop in text for stop in stops)


def test_what_cannot_begin_a_stop_string_is_not_held_back():
    detokenizer = Detokenizer(PIECES.__getitem__, stops=("abba",))
    assert [detokenizer.read(token) for token in (0, 0, 1, 0, 1, 1)] == ["", "a", "", "ab", "", ""]
    assert detokenizer.read(5) == "abbé" and detokenizer.end() == ""


@pytest.mark.parametrize("name", ["gpt2", "sotu-4096"])
@pytest.mark.parametrize(
    ("answered", "whole"), [(True, "So <<4*5=20>>"), (False, "So <<4*5>> is"), (None, "So <<4*5")]
)
def test_a_call_is_written_as_it_is_when_read_at_once(name, answered, whole):
    chat = ChatFormat(load_tokenizer(name))
    ids = [*chat.tokenizer.encode("So ").tolist(), chat.ids.python_start]
    ids += chat.tokenizer.encode("4*5").tolist()
    if answered is not None:
        after = chat.output("20") if answered else chat.tokenizer.encode(" is").tolist()
        ids += [chat.ids.python_end, *after]
    writer = Writer(chat)
    detokenizer = Detokenizer(writer.piece, writer.rest)
    text = "".join([detokenizer.read(token) for token in ids]) + detokenizer.end()
    assert text == chat.decode_answer(ids) == whole and chat.decode_answer([]) == ""
