"""One greedy text a model, whichever way it is decoded: the whole-sequence forward's."""

import numpy as np
import pytest
from support.engines import PROMPTS, SHARED, assert_greedy, engine_of, whole_logits
from support.marks import quick
from support.variants import FIVE, LRKVS, error

from lrkv_jax.models.attention import MLA

EXACT = 1e-5  # float32, relative to the logits' scale
MODELS = {
    "mha": FIVE["mha"],
    "mla": MLA(kv_lora_rank=24, qk_rope_head_dim=8),  # widths that the kernel takes
    "lrkv": FIVE["lrkv"],
    "lrkv-shared": LRKVS["lrkv-shared-odd_rank"],
    "lrkv-latent": LRKVS["lrkv-latent-odd_rank"],
}
CONTINUATIONS = [[(7 * i + row) % 40 for i in range(6)] for row in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("name", "layers"),
    quick(slow=[*((name, 1) for name in MODELS), ("lrkv", 2)]),
)
def test_texts_and_logits_are_the_forwards_whatever_is_read_beside(name, layers):
    """Ragged prompts, read in chunks and decoded in calls of which the last is not whole."""
    engine = engine_of(MODELS[name], model={"layers": layers}, **SHARED)
    check_greedy(engine, 11)
    together_BNV = engine.forced_logits(PROMPTS, CONTINUATIONS)
    rows = [p + c for p, c in zip(PROMPTS, CONTINUATIONS, strict=True)]
    forward = whole_logits(engine.config, rows)
    for prompt, more, logits_NV, forward_TV in zip(
        PROMPTS, CONTINUATIONS, together_BNV, forward, strict=True
    ):
        assert error(logits_NV, forward_TV[len(prompt) - 1 : -1]) <= EXACT
        assert np.ptp(forward_TV) > 1
        engine.reset()  # or its pages would be found
        np.testing.assert_array_equal(engine.forced_logits([prompt], [more])[0], logits_NV)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mla", "lrkv"])
def test_greedy_text_is_the_forwards_by_an_interpreted_kernel(name):
    model = {"decode_kernel": "interpret"}
    check_greedy(engine_of(MODELS[name], model=model, steps_per_call=2), 4)


def check_greedy(engine, new):
    texts = engine.generate(PROMPTS, new)
    assert_greedy(engine.config, PROMPTS, texts)
    assert len({tuple(text) for text in texts}) == len(texts), "the prompts made no difference"
    assert min(len(set(text)) for text in texts) > 1
