"""A long context beside a long continuation: together they do not fit the cache of either."""

import numpy as np
from hand_built import language_model
from variants import FIVE, random_params, random_tokens, small

from lrkv_jax.data.tokenizer import load_tokenizer

CONFIG = small(FIVE["mqa"], layers=1)


def ids(count):
    return random_tokens(count, seed=count).tolist()


def test_each_scores_what_it_scores_alone():
    made = CONFIG, random_params(CONFIG)
    model = language_model(load_tokenizer("sotu-4096"), made, batch=3, context=31)
    asked = [(ids(28), [ids(3)]), (ids(1), [ids(31), ids(2)]), (ids(25), [ids(4)])]
    done = []
    model.progress = done.append
    together = model.log_likelihoods(asked)
    assert sum(done) == len(asked) and len(done) == 2
    for question, row in zip(asked, together, strict=True):
        (alone,) = model.log_likelihoods([question])
        log_p = [[score.log_p for score in scores] for scores in (row, alone)]
        np.testing.assert_allclose(*log_p, rtol=1e-5)
