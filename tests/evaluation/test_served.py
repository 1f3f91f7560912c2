"""The harness asks a server what it asks the same model in this process, and gets the same."""

import pytest
from support.hand_built import a_run
from support.variants import FIVE, random_params, small

from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.language_model import Draws, LanguageModel
from lrkv_jax.serving.server import serving
from lrkv_jax.serving.service import Service

pytestmark = pytest.mark.harness

PAIRS = [
    ("We the people", " of the United States"),
    ("The state of our union", " is"),
    ("My fellow", " Americans"),
    ("Taxes and spending and work,", " the people, and ".join(["a", "b", "c"]) * 4),
]


def test_local_completions_scores_and_texts_are_those_of_the_process():
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    tokenizer = load_tokenizer("sotu-4096")
    config = small(FIVE["lrkv"], vocabulary=tokenizer.vocabulary, layers=1)
    run = a_run(config, random_params(config, 3), context=256)
    with serving(Service.of(run, "tiny", batch=4, context=256)) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        there = LocalCompletionsAPI(
            base_url=url, model="tiny", tokenized_requests=False, batch_size=4, max_length=256
        )
        asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
        scores = there.loglikelihood(asked)
        until = {"until": ["."], "max_gen_toks": 20}
        begun = [
            Instance("generate_until", {}, (text, dict(until)), i)
            for i, (text, _) in enumerate(PAIRS)
        ]
        texts = there.generate_until(begun)

    here = LanguageModel.of(run, batch=4)
    pairs = [here.pair(*pair) for pair in PAIRS]
    expected = here.log_likelihoods([(context, [text]) for context, text in pairs])
    for (log_p, greedy), (score,) in zip(scores, expected, strict=True):
        assert log_p == pytest.approx(score.log_p, abs=1e-4) and greedy == score.greedy
    prompts = [here.prompt(text) for text, _ in PAIRS]
    assert texts == [text for (text,) in here.continuations(prompts, 20, ["."], Draws(Sampling()))]
