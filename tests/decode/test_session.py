"""A session's sequences grow in the cache as if each had been prefilled whole."""

import numpy as np
import pytest
from support.engines import PROMPTS, engine_of, whole_logits
from support.variants import FIVE, random_tokens

from lrkv_jax.decode import Sampling
from lrkv_jax.errors import LrkvError

ONE_FAST = [name if name == "lrkv" else pytest.param(name, marks=pytest.mark.slow) for name in FIVE]
MORE = [random_tokens(n, seed=50 + n).tolist() for n in (3, 19, 2, 6)]


@pytest.fixture(scope="module")
def engine():
    return engine_of(FIVE["lrkv"], length=96)


def columns(rows):
    return [[t for t in column if t >= 0] for column in np.transpose(list(rows)).tolist()]


def test_turns_say_what_one_long_prompt_says(engine):
    """The first answers are left early, sequences differ in length, and one of them waits."""
    with engine.session() as session:
        session.append(PROMPTS)
        stream = session.stream(9)
        first = columns([next(stream) for _ in range(5)])
        stream.close()
        assert session.cached.tolist() == [len(p) + 4 for p in PROMPTS]
        turn = [MORE[0], MORE[1], None, MORE[3]]
        session.append(turn)
        second = columns(session.stream(7))
        assert second[2] == []
        session.append([None, None, MORE[2]])
        last = columns(session.stream(4))
        assert [len(answer) for answer in last] == [0, 0, 4, 0]
        session.append([None, None, []])
        more = columns(session.stream(3))[2]
    whole = [p + a + (t or []) for p, a, t in zip(PROMPTS, first, turn, strict=True)]
    assert first == [answer[:5] for answer in engine.generate(PROMPTS, 9)]
    expected = engine.generate(whole, 7)
    assert second == [expected[0], expected[1], [], expected[3]]
    assert last[2] + more == engine.generate([whole[2] + MORE[2]], 7)[0]


@pytest.mark.parametrize("name", ONE_FAST)
def test_scores_are_the_forwards_and_choices_share_their_context(name):
    engine = engine_of(FIVE[name], length=96)
    choices = [MORE, [m[::-1] + [1] for m in MORE]]  # scored one after the other
    # Of each batch of choices, a row of logits a sequence.
    logits = [
        [
            np.float64(logits_TV)
            for logits_TV in whole_logits(
                engine.config, [p + m for p, m in zip(PROMPTS, choice, strict=True)]
            )
        ]
        for choice in choices
    ]
    log_p = [[z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in rows] for rows in logits]
    with engine.session() as session:
        session.append(PROMPTS)
        cached = session.cached.tolist()
        asked = [[3, 1], [2], [7, 7, 9], [0]]
        nexts = session.next_log_p(asked)
        for row, (prompt, ids) in enumerate(zip(PROMPTS, asked, strict=True)):
            np.testing.assert_allclose(nexts[row], log_p[0][row][len(prompt) - 1, ids], atol=1e-5)
        for batch, choice in enumerate(choices):
            scores, likeliest = session.score(choice)
            assert session.cached.tolist() == cached
            for row, (prompt, more) in enumerate(zip(PROMPTS, choice, strict=True)):
                at = np.arange(len(prompt) - 1, len(prompt + more) - 1)
                np.testing.assert_allclose(scores[row], log_p[batch][row][at, more], atol=1e-5)
                best = logits[batch][row][at].argmax(-1)
                assert likeliest[row].tolist() == (best == more).tolist()
        answers = columns(session.stream(3))
    assert answers == engine.generate(PROMPTS, 3), "scoring leaves the sequences as they were"


def test_a_long_continuation_is_scored_in_pieces(engine):
    long = random_tokens(41, seed=9).tolist()  # of 16 at a time
    with engine.session() as session:
        session.append([PROMPTS[1]])
        (pieces,), _ = session.score([long])
        ones = []
        for token in long:
            ones.append(float(session.score([[token]])[0][0][0]))
            session.append([[token]])
    np.testing.assert_allclose(pieces, ones, atol=1e-5)


def test_draws_name_a_sequences_randomness_whatever_row_it_is_in(engine):
    how = {"sampling": Sampling(1.0), "seed": 4}
    one = engine.generate(PROMPTS[:2], 8, draws=[7, 3], **how)
    other = engine.generate(PROMPTS[1::-1], 8, draws=[3, 7], **how)
    assert one == other[::-1]
    assert engine.generate(PROMPTS[:1] * 2, 8, draws=[1, 2], **how)[0] != one[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.append([[], None]), "nothing to append"),
        (lambda s: s.append([[1] * 97]), "97 tokens do not fit a cache of 96"),
        (lambda s: s.append([[99]]), "sequence 0 has the token id 99"),
        (lambda s: s.append([[1]]) or list(s.stream(96)), "new_tokens = 96: use 1 to 95"),
        (
            lambda s: s.append([[1]]) or s.score([[1] * 96]),
            "96 tokens of a continuation do not fit",
        ),
        (lambda s: s.score([[99]]), "continuation 0 has the token id 99"),
    ],
)
def test_what_does_not_fit_is_refused(engine, call, message):
    with engine.session() as session, pytest.raises(LrkvError, match=message):
        call(session)
