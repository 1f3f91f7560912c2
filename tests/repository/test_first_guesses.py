"""What a newcomer types first from Python works, or is answered in one line with what would."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import lrkv_jax as lj
from lrkv_jax.models.transformer import init_parameters

SHAPE = {"width": 32, "heads": 4, "head_width": 8}


@functools.cache
def layer():
    config = lj.ModelConfig(**SHAPE, attention=lj.LRKV(rank=3), dtype="float32")
    made = lj.make_attention(config, rngs=nnx.Rngs(0))
    made.output.set_value(jnp.ones_like(made.output[...]))  # drawn as zeros
    return made


def decode(length, tokens, lengths, wrapped=lambda call: call):
    x_BTD, cache = jnp.zeros((3, tokens, 32)), layer().init_cache(batch=3, length=length)
    return wrapped(layer().decode)(x_BTD, cache, jnp.asarray(lengths))


@functools.cache
def engine():
    config = lj.load_config("quickstart", ["model.layers=1", "model.unroll=1"]).model
    return lj.Engine(config, jax.jit(lambda: init_parameters(config, 0))(), batch=1, length=16)


WRONG = {
    "a name of transformers": (
        lambda: lj.ModelConfig(hidden_size=32, heads=4, attention=lj.MHA()),
        "unknown key hidden_size: use width",
    ),
    "a name like ours": (
        lambda: lj.ModelConfig(width=32, num_heads=4, attention=lj.MHA()), "did you mean heads?"
    ),
    "a variant by its name": (
        lambda: lj.ModelConfig(**SHAPE, attention="lrkv"), "as in lrkv_jax.LRKV(rank=8)"
    ),
    "a rank by its place": (lambda: lj.LRKV(8), "LRKV takes its settings by name: rank=8"),
    "a rank as a text": (lambda: lj.LRKV(rank="8"), "rank = '8' should be a valid integer"),
    "a variant for a model": (
        lambda: lj.make_attention(lj.LRKV(rank=8), rngs=nnx.Rngs(0)), "give a ModelConfig, as in"
    ),
    "no batch": (lambda: layer()(jnp.zeros((5, 32))), "give floating-point [batch, positions, 32]"),
    "whole numbers": (lambda: layer()(jnp.zeros((1, 5, 32), int)), "input is int32[1, 5, 32]"),
    "no tokens": (lambda: layer()(jnp.zeros((1, 0, 32))), "input is float32[1, 0, 32]"),
    "other positions": (
        lambda: layer()(jnp.zeros((3, 5, 32)), jnp.arange(4)), "= [0 1 2 3]: give integers [3, 5]"
    ),
    "positions between": (
        lambda: layer()(jnp.zeros((1, 2, 32)), jnp.ones((1, 2))), "positions = [[1. 1.]]: give"
    ),
    "other segments": (
        lambda: layer()(jnp.zeros((1, 2, 32)), None, [1, 2, 3]), "segments = [1, 2, 3]: give"
    ),
    "lengths of others": (lambda: decode(10, 1, [0, 0]), "lengths = [0 0]: give integers [3]"),
    "lengths between": (lambda: decode(10, 1, 0.5), "lengths = 0.5: give integers [3]"),
    "a seed for rngs": (
        lambda: lj.make_attention(layer().config, rngs=0), "rngs = 0: give nnx.Rngs, as in"
    ),
    "rngs without parameters": (
        lambda: lj.make_attention(layer().config, rngs=nnx.Rngs(dropout=0)), "give nnx.Rngs, as in"
    ),
    "a rule as a text": (
        lambda: lj.make_attention(layer().config, rngs=nnx.Rngs(0), axis_rules="heads"),
        "axis_rules = 'heads': give pairs, as in",
    ),
    "a list for an array": (lambda: layer()([[1.0] * 32]), "the layer's input is a list: give"),
    "a negative batch": (lambda: layer().init_cache(-1, 10), "init_cache(-1, 10, "),
    "half a slot": (lambda: layer().init_cache(2, 10.5), "a length of 1 or more"),
    "no such dtype": (lambda: layer().init_cache(2, 10, "float33"), "'float33'): give"),
    "another width": (lambda: layer()(jnp.zeros((1, 5, 16))), "float32[1, 5, 16]"),
    "more tokens than slots": (
        lambda: decode(10, 24, [0, 0, 0], jax.jit), "24 new tokens, in a cache of 10 slots"
    ),
    "a full cache": (lambda: decode(10, 1, [3, 10, 0]), "lengths 0 to 10 and 1 new tokens"),
    "a negative length": (lambda: decode(10, 1, [3, -1, 0]), "lengths are 0 or more"),
    "lengths in a byte": (
        lambda: decode(10, 8, jnp.full(3, 250, jnp.uint8)), "250 to 250 and 8 new tokens"
    ),
    "no run": (lambda: lj.load_run("nowhere"), "nowhere is not a run"),
    "a name to train": (lambda: lj.train("quickstart"), "give it load_config(NAME, overrides)"),
    "a setting that is none": (
        lambda: lj.load_config("quickstart", {"train": {"step": 3}}),
        "unknown key train.step: did you mean steps?",
    ),
    "a page table of another batch": (
        lambda: layer().decode(jnp.zeros((2, 1, 32)), layer().init_cache(4, 16), [0, 0], [[1]]),
        "pages [1, 1]: give integers [2, pages]",
    ),
    "a share for top_k": (lambda: lj.Sampling(0.8, 0.95), "top_k = 0.95: use a whole number"),
    "no temperature": (lambda: lj.Sampling(None), "temperature = None: use a number"),
    "a list of ids for a bias": (lambda: lj.Sampling(bias=[1]), "bias = [1]: give a mapping"),
    "half a token": (lambda: engine().submit([1], 4.5), "max_tokens = 4.5: use a whole number"),
    "a key of JAX": (
        lambda: engine().submit([1], 4, rng=jax.random.key(0)), "give a RngStream"
    ),
    "a folder for an engine": (lambda: lj.Engine("runs/x"), "an Engine of a str: give a run"),
    "a bare engine": (lambda: lj.Engine(layer().config), "needs its parameters and a length"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_guess_is_answered_in_one_line(case):
    call, answer = WRONG[case]
    with pytest.raises(lj.LrkvError) as raised:
        call()
    assert answer in str(raised.value) and "\n" not in str(raised.value)


def test_lists_and_what_stands_for_every_sequence_are_taken():
    x_BTD, cache = jnp.ones((2, 3, 32)), layer().init_cache(batch=2, length=8)
    whole = layer()(x_BTD, jnp.arange(3), [0, 0, 1])
    assert whole.any()
    assert jnp.array_equal(whole, layer()(x_BTD, None, jnp.array([[0, 0, 1]] * 2)))
    decoded = [layer().decode(x_BTD, cache, lengths)[0] for lengths in (0, [0, 0])]
    assert jnp.array_equal(*decoded)


@pytest.mark.slow
def test_right_guesses_about_a_run_work(finished_run):
    run = lj.load_run(finished_run.directory)
    assert repr(run).startswith(f"TrainedRun({run.directory}, step {run.step}, ")
    assert len(repr(run)) < 300
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
    assert jnp.array_equal(run.apply(run.params, [[3, 4]]), logits)
    for call, answer in (
        (lambda: run.generate(["The"]), "the prompt is a list: give a text"),
        (lambda: run.logits(3), "the prompt is a int: give a text"),
        (lambda: run.generate("The", 3, seed="x"), "seed = 'x': use a whole number"),
        (lambda: run.generate("The", 3, seed=2**63), "seed = 9223372036854775808: use a number b"),
        (lambda: run.apply({}, [[3, 4]]), "the parameters are another model's: blocks"),
        (lambda: run.apply(run.params, [[50256]]), "tokens has the token id 50256"),
        (lambda: run.apply(run.params, [3, 4]), r"int32\[2\]: give token ids \[batch, positions"),
    ):
        with pytest.raises(lj.LrkvError, match=answer):
            call()


def test_settings_are_texts_or_mappings():
    mapping = {"train": {"steps": 3}, "attention": {"rank": 4}}
    config = lj.load_config("quickstart", ["train.steps=3", "attention.rank=4"])
    assert config == lj.load_config("quickstart", mapping)
    assert lj.load_config("quickstart", "train.steps=3").train.steps == 3
