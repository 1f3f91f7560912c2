"""What a newcomer types first from Python works, or is answered in one line with what would."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import lrkv_jax as lj

SHAPE = {"width": 32, "heads": 4, "head_width": 8}


@functools.cache
def layer():
    config = lj.ModelConfig(**SHAPE, attention=lj.LRKV(rank=3), dtype="float32")
    return lj.make_attention(config, rngs=nnx.Rngs(0))


def decode(length, tokens, lengths, wrapped=lambda call: call):
    x_BTD, cache = jnp.zeros((3, tokens, 32)), layer().init_cache(batch=3, length=length)
    return wrapped(layer().decode)(x_BTD, cache, jnp.asarray(lengths))


WRONG = {
    "a name of transformers": (
        lambda: lj.ModelConfig(hidden_size=32, heads=4, attention=lj.MHA()),
        "unknown key hidden_size: use width",
    ),
    "a name like ours": (
        lambda: lj.ModelConfig(width=32, num_heads=4, attention=lj.MHA()), "did you mean heads?"
    ),
    "a variant by its name": (
        lambda: lj.ModelConfig(**SHAPE, attention="lrkv"), "as in lrkv_jax.LRKV()"
    ),
    "a rank by its place": (lambda: lj.LRKV(8), "LRKV takes its settings by name: rank=8"),
    "a rank as a text": (lambda: lj.LRKV(rank="8"), "rank = '8' should be a valid integer"),
    "a variant for a model": (
        lambda: lj.make_attention(lj.LRKV(rank=8), rngs=nnx.Rngs(0)), "give a ModelConfig, as in"
    ),
    "no batch": (lambda: layer()(jnp.zeros((5, 32))), "give [batch, positions, 32]"),
    "another width": (lambda: layer()(jnp.zeros((1, 5, 16))), "float32[1, 5, 16]"),
    "more tokens than slots": (
        lambda: decode(10, 24, [0, 0, 0], jax.jit), "24 new tokens, in a cache of 10 slots"
    ),
    "a full cache": (lambda: decode(10, 1, [3, 10, 0]), "lengths 0 to 10 and 1 new tokens"),
    "a negative length": (lambda: decode(10, 1, [3, -1, 0]), "lengths are 0 or more"),
    "no run": (lambda: lj.load_run("nowhere"), "nowhere is not a run"),
    "a name to train": (lambda: lj.train("quickstart"), "give it load_config(NAME, overrides)"),
    "a setting that is none": (
        lambda: lj.load_config("quickstart", {"train": {"step": 3}}),
        "unknown key train.step: did you mean steps?",
    ),
    "a bare engine": (lambda: lj.Engine(layer().config), "needs its parameters and a length"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_guess_is_answered_in_one_line(case):
    call, answer = WRONG[case]
    with pytest.raises(lj.LrkvError) as raised:
        call()
    assert answer in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_right_guesses_about_a_run_work(finished_run):
    run = lj.load_run(finished_run.directory)
    assert run.tokenizer("The") == run.tokenizer.encode("The").tolist()
    text = run.generate("The", max_new_tokens=3, temperature=0)
    assert text == run.generate("The", 3, sampling=lj.Sampling())
    engine = lj.Engine(run, batch=1, length=16)
    (new,) = engine.generate([run.ids("The")], 3, stop=run.tokenizer.eos_token_ids)
    assert run.tokenizer.decode(new) == text
    logits = run.apply(run.params, jnp.array([[3, 4]]))
    assert jnp.allclose(logits, run.model([[3, 4]]), atol=1e-5)
    for settings, answer in (
        ({"max_tokens": 3}, "did you mean max_new_tokens?"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0: use 1 or more"),
    ):
        with pytest.raises(lj.LrkvError, match=answer):
            run.generate("The", **settings)
    with pytest.raises(lj.LrkvError, match="the prompt is a list: give a text"):
        run.generate(["The"])


def test_settings_are_texts_or_mappings():
    mapping = {"train": {"steps": 3}, "attention": {"rank": 4}}
    config = lj.load_config("quickstart", ["train.steps=3", "attention.rank=4"])
    assert config == lj.load_config("quickstart", mapping)
    assert lj.load_config("quickstart", "train.steps=3").train.steps == 3
