"""A request that is appended to goes on as if all were its prompt; scores are the forward's."""

import jax
import numpy as np
import pytest
from support.engines import PROMPTS, SHARED, engine_of, whole_logits
from support.marks import quick
from support.variants import FIVE, VOCABULARY, random_tokens

from lrkv_jax.inference import Sampling
from lrkv_jax.inference.calls import _key_data
from lrkv_jax.inference.request import RngStream
from lrkv_jax.inference.sampling import PRNG

MORE = [random_tokens(n, seed=50 + n).tolist() for n in (3, 19, 2, 6)]


@pytest.fixture(scope="module")
def engine():
    return engine_of(FIVE["lrkv"], **SHARED)


def test_turns_say_what_one_long_prompt_says(engine):
    """The first answers are left early, turns differ in length, and one is empty."""
    requests = [engine.submit(prompt, 9, retain=True) for prompt in PROMPTS]
    while min(len(request.output_ids) for request in requests) < 5:
        engine.advance()
    for request, prompt in zip(requests, PROMPTS, strict=True):
        engine.cancel(request, retain=len(prompt) + 5)
    first = [request.output_ids for request in requests]
    turns = [MORE[0], MORE[1], [], MORE[3]]
    for request, turn in zip(requests, turns, strict=True):
        engine.append(request, turn, 7)
    engine.finish(requests)
    second = [request.output_ids for request in requests]
    whole = [p + a + t for p, a, t in zip(PROMPTS, first, turns, strict=True)]
    assert [request.cached for request in requests] == [len(text) + 6 for text in whole]
    for request in requests:
        engine.cancel(request)
    assert engine.scheduler.idle and not engine.scheduler._retained
    engine.reset()  # or their pages would be found
    assert first == [answer[:5] for answer in engine.generate(PROMPTS, 9)]
    assert second == engine.generate(whole, 7)


def test_penalties_and_min_tokens_count_what_the_model_chose_in_this_turn(engine):
    """A later turn's answer is a fresh request's; what a tool gives within one does not count."""
    how = {"sampling": Sampling(frequency_penalty=1.5, presence_penalty=1.5)}
    (free,) = engine.generate([PROMPTS[1] + MORE[2]], 9)
    how |= {"stop_token_ids": frozenset(free[:2]), "min_tokens": 4}

    def texts(prompt, *parts):
        """What each part's new tokens are: (tokens to append, new tokens, within the turn)."""
        request = engine.submit(prompt, 6, retain=True, **how)
        said = []
        for tokens, max_new_tokens, same_turn in (*parts, (None, None, None)):
            engine.finish([request])
            said.append(request.tokens[request.prompt_length :])
            if tokens is not None:
                engine.append(request, tokens, max_new_tokens, same_turn=same_turn)
        engine.cancel(request)
        return said

    user = (MORE[1] + MORE[0]) * 2
    first, second = texts(PROMPTS[1], (user, 9, False))
    assert len(first) > 4 and len(second) > 4
    fresh = engine.submit(PROMPTS[1] + first + user, 9, **how)
    engine.finish([fresh])
    assert second == fresh.tokens[fresh.prompt_length :]
    # A tool's output between two parts of one answer: counted are both parts, and not it.
    first, second = texts(PROMPTS[1], (user, 9, True))
    whole, counts = PROMPTS[1] + first + user, np.zeros(VOCABULARY)
    for token in first:
        counts[token] += 1
    for token in second:
        (logits_TV,) = whole_logits(engine.config, [whole])
        assert token == (logits_TV[-1] - 1.5 * counts - 1.5 * (counts > 0)).argmax()
        whole, counts[token] = [*whole, token], counts[token] + 1


@pytest.mark.parametrize("name", quick("lrkv", slow=FIVE))
def test_scores_are_the_forwards_and_choices_share_their_context(name):
    engine = engine_of(FIVE[name], **SHARED)
    long = random_tokens(21, seed=9).tolist()  # scored in two pieces
    choices = [[more, more[::-1] + [1], long] for more in MORE]
    scored = [engine.submit(p, continuations=c) for p, c in zip(PROMPTS, choices, strict=True)]
    engine.finish(scored)
    for row, prompt in enumerate(PROMPTS):
        rows = whole_logits(engine.config, [prompt + choice for choice in choices[row]])
        logits = [np.float64(logits_TV) for logits_TV in rows]
        log_p = [z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in logits]
        places = [np.arange(len(prompt) - 1, len(prompt + choice) - 1) for choice in choices[row]]
        of_all = [p[at, c] for p, at, c in zip(log_p, places, choices[row], strict=True)]
        best = [
            z[at].argmax(-1) == c for z, at, c in zip(logits, places, choices[row], strict=True)
        ]
        ours, likeliest = (
            np.concatenate(x) for x in (scored[row].result.log_p, scored[row].result.is_greedy)
        )
        np.testing.assert_allclose(ours, np.concatenate(of_all), atol=1e-5)
        assert likeliest.tolist() == np.concatenate(best).tolist()


def test_a_text_draws_from_its_stream_whatever_row_it_is_in(engine):
    one, other = engine.generate(PROMPTS[:1] * 2, 8, sampling=Sampling(1.0), seed=4)
    assert one != other
    alone = engine.submit(PROMPTS[0], 8, sampling=Sampling(1.0), rng=RngStream(4, 1))
    engine.finish([alone])
    assert alone.output_ids == other
    seeds = 7, 2**32 + 7, -7, 2**32 - 7, 2**63 - 7
    keys = {seed: tuple(_key_data(seed).tolist()) for seed in seeds}
    assert len(set(keys.values())) == 5, "no seed is another's"
    assert keys[7] == tuple(jax.random.key_data(jax.random.key(7, impl=PRNG)).tolist())


def test_each_token_of_a_text_is_drawn_by_its_own_place(engine):
    """Token n is drawn from the stream and n alone, so that a text can be taken up anywhere."""
    how, rng = Sampling(50.0), RngStream(4, 1)
    text = engine.submit(PROMPTS[0], 24, sampling=how, rng=rng)
    engine.finish([text])
    assert len(set(text.output_ids)) > 12
    later = [
        engine.submit(PROMPTS[0] + text.output_ids[:n], 1, sampling=how, rng=rng) for n in (1, 9)
    ]
    engine.finish(later)
    assert [one.output_ids for one in later] == [[text.output_ids[n]] for n in (1, 9)]
