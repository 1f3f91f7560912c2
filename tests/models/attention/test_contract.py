"""What every attention variant promises: one suite, all variants.

B batch  T positions  S cache slots  D model width  V vocabulary  H heads  G key/value heads
N = H / G
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracle
from support.marks import quick
from support.variants import (
    ALL,
    MODES,
    PRETRAINED,
    VOCABULARY,
    WIDTH,
    error,
    random_model,
    random_tokens,
    small,
)

from lrkv_jax.errors import LrkvError
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.models.attention import cache as attention_cache
from lrkv_jax.models.attention.cache import write

EXACT = 1e-5  # float32, relative to the logits' scale
PROMPTS = (5, 2, 7)  # ragged, in one batch
PADDED, TOTAL, SLOTS = 9, 12, 16  # more than the queries that decode kernels take
CHUNK = 3

TOKENS_BT = random_tokens(len(PROMPTS), TOTAL)


# Variants in models with all that pretrained ones have, and without QK-norm. GQA's norm is the one
# that all queries and keys have; MLA and LRKV have others beside it.
CHANGED = {
    f"{n}-pretrained": (n, PRETRAINED)
    for n in ("gqa", "lrkv-full-groups", "lrkv-none-groups", "mla-full-rank")
} | {
    f"{n}-no_norm": (n, {"qk_norm": False})
    for n in ("gqa", "mla", "mla-full", *(f"lrkv-{mode}-odd_rank" for mode in MODES))
}
# Shorter and longer than a prompt; chunks of three tokens reach over its edge.
CHANGED |= {
    f"{n}-window": (n, {"window": 4})
    for n in ("gqa", "mla", "mla-full-rank", *(f"lrkv-{mode}-groups" for mode in MODES))
}


@pytest.fixture(
    scope="module",
    params=quick("mla", "lrkv-full-odd_rank", slow=(*ALL, *CHANGED)),
)
def name(request):
    """Every variant; of module scope, so that a variant's tests run together and share programs."""
    return request.param


@functools.cache
def model_of(name, dtype="float32", layers=1):
    """A model of one layer: what joins layers is tests/repository/test_model.py's."""
    name, changes = CHANGED.get(name, (name, {}))
    return random_model(small(ALL[name], dtype=dtype, layers=layers, **changes))


@pytest.fixture(autouse=True, scope="module")
def tiles_of_five_slots():
    """Prefill reads 16 slots in four tiles, the last of which reaches back: not all in one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention_cache, "PREFILL_TILE", 5)
        yield


@functools.cache
def programs(model):
    """The jitted model and decode: one program a shape, shared by the tests."""

    # Weights are arguments: XLA would spend its time folding constants.
    @jax.jit
    def whole(model, tokens_BT):
        return model(tokens_BT)

    @jax.jit
    def decode(model, tokens_BT, cache, lengths_B):
        x_BTD, cache = model.decode(tokens_BT, cache, lengths_B)
        return model.logits(x_BTD), cache

    return [partial(program, model) for program in (whole, decode)]


@functools.cache
def whole_logits(name, dtype="float32"):
    return np.asarray(programs(model_of(name, dtype))[0](TOKENS_BT))


def from_cache(model, tokens_BT, prompts, cache, padding=0, chunk=CHUNK):
    """Logits of each position, from a ragged prefill, a chunk of several tokens, single steps."""
    B, T = tokens_BT.shape
    lengths_B, rows_B1 = np.array(prompts), np.arange(B)[:, None]
    prompt_BT = np.where(np.arange(PADDED) < lengths_B[:, None], tokens_BT[:, :PADDED], padding)
    _, decode = programs(model)
    logits_BTV, cache = decode(prompt_BT, cache, np.zeros(B, int))
    logits_BTV = np.pad(logits_BTV, ((0, 0), (0, T - PADDED), (0, 0)), constant_values=np.nan)
    while lengths_B.max() < T:
        t = chunk if (lengths_B == prompts).all() else 1
        slots_Bt = lengths_B[:, None] + np.arange(t)
        logits_BtV, cache = decode(tokens_BT[rows_B1, slots_Bt], cache, lengths_B)
        logits_BTV[rows_B1, slots_Bt] = logits_BtV
        lengths_B = lengths_B + t
    known_BT = np.arange(T) < lengths_B[:, None]
    return logits_BTV, known_BT


def test_decode_equals_forward(name):
    model = model_of(name)
    cached_BTV, known_BT = from_cache(model, TOKENS_BT, PROMPTS, model.init_cache(3, SLOTS))
    whole_BTV = whole_logits(name)
    assert known_BT.sum() == sum(PROMPTS) + 3 * (TOTAL - max(PROMPTS))
    assert np.ptp(whole_BTV) > 1  # not vacuous
    assert error(cached_BTV[known_BT], whole_BTV[known_BT]) <= EXACT
    greedy = cached_BTV[known_BT].argmax(-1)
    np.testing.assert_array_equal(greedy, whole_BTV[known_BT].argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("gqa", "mla", "mla-full", *(f"lrkv-{m}-odd_rank" for m in MODES)))
def test_decode_equals_forward_in_bfloat16_within_rounding(name):
    """The cache adds no more error than the format itself: float32 is the yardstick of both."""
    model = model_of(name, "bfloat16")
    cached_BTV, known_BT = from_cache(
        model, TOKENS_BT, PROMPTS, model.init_cache(3, SLOTS), chunk=1
    )
    truth = whole_logits(name)[known_BT]
    whole = whole_logits(name, "bfloat16")[known_BT]

    def rms(x):
        return np.sqrt(np.mean(np.square(x, dtype=np.float64)))

    rounding = 2.0**-8 * rms(truth)
    assert rms(whole - truth) > 0.1 * rounding  # it did run in bfloat16
    assert rms(cached_BTV[known_BT] - truth) <= 1.5 * rms(whole - truth) + rounding
    assert rms(cached_BTV[known_BT] - whole) <= 6 * rounding


def test_whole_sequence_equals_float64_oracle(name):
    """The second of two sequences is two documents, packed with restarting positions."""
    config = model_of(name).config
    layer = model_of(name).blocks[0].attention
    weights = {
        key: value[...] for key, value in vars(layer).items() if hasattr(value, "get_metadata")
    }
    rng = np.random.default_rng(1)
    x_BTD = np.float32(rng.standard_normal((2, TOTAL, WIDTH)))
    positions_BT = np.stack([np.arange(TOTAL), np.r_[np.arange(5), np.arange(7)]])
    segments_BT = np.stack([np.zeros(TOTAL, int), np.repeat([0, 1], [5, 7])])

    @jax.jit
    def both(layer, x_BTD):
        out_BTHK = layer.heads(x_BTD, positions_BT, segments_BT)
        return out_BTHK, layer(x_BTD, positions_BT, segments_BT)

    out_BTHK, out_BTD = both(layer, x_BTD)
    for b in range(2):
        truth = oracle.attention(config, weights, x_BTD[b], positions_BT[b], segments_BT[b])
        assert error(out_BTHK[b], truth) <= EXACT
    # The output projection, once for all variants: heads concatenated, times one matrix.
    truth_BTD = np.tensordot(np.float64(out_BTHK), np.float64(layer.output[...]), 2)
    truth_BTD += weights.get("output_bias", 0)
    assert error(out_BTD, truth_BTD) <= EXACT


def test_causality_to_the_bit(name):
    """Another input(s) leaves output(t) as it is to the bit for t < s, and changes it from s on."""
    layer = model_of(name).blocks[0].attention
    T = 5
    rng = np.random.default_rng(2)
    x_TD, other_TD = np.float32(rng.standard_normal((2, T, WIDTH)))
    positions_BT = jnp.arange(T)[None]
    # A chunk of one decode call, after two cached tokens (whatever they are).
    filled = jax.tree.map(lambda leaf: leaf + 0.5, layer.init_cache(1, SLOTS, jnp.float32))

    @jax.jit
    def paths(layer, x_TD, filled):
        whole_BTD = layer(x_TD[None], positions_BT)
        decoded_BTD, _ = layer.decode(x_TD[None], filled, jnp.array([2]))
        return jnp.concatenate([whole_BTD, decoded_BTD])

    out_2TD = np.asarray(paths(layer, x_TD, filled))
    for s in range(T):
        changed_TD = np.where(np.arange(T)[:, None] == s, other_TD, x_TD)
        changed_2TD = np.asarray(paths(layer, changed_TD, filled))
        np.testing.assert_array_equal(changed_2TD[:, :s], out_2TD[:, :s])
        sizes_2T = np.linalg.norm(changed_2TD - out_2TD, axis=-1)
        beyond = s + (layer.config.window or T)  # it sees no further back
        assert (sizes_2T[:, s:beyond] > 1e-4).all() and not sizes_2T[:, beyond:].any()


def test_live_cache_bytes_equal_the_formula(name):
    model = model_of(name, "bfloat16", layers=2)
    config, itemsize = model.config, 2
    entry = config.attention
    values = entry.cache_values(config) + entry.cache_padding_values(config)
    a_layer = values * itemsize + 4 * entry.cache_scalars(config)
    batch = 3
    cache = model.init_cache(batch, SLOTS)
    # What decode hands back is as large as what it was given, of many tokens and of few.
    for tokens in (PADDED, CHUNK):
        tokens_BT = jnp.asarray(TOKENS_BT[:, :tokens])
        after = jax.eval_shape(model.decode, tokens_BT, cache, jnp.array([5, 2, 7]))[1]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
            lambda x: (x.shape, x.dtype), cache
        )
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert nbytes == batch * SLOTS * config.layers * a_layer
    assert cache_allocated_bytes_per_token(config, itemsize) == config.layers * a_layer


def test_batch_padding_and_leftovers_change_nothing(name):
    """A sequence's logits do not depend on its companions, the padding, or the cache's past."""
    model = model_of(name)
    clean_BTV, known_BT = from_cache(model, TOKENS_BT, PROMPTS, model.init_cache(3, SLOTS))
    # Finite leftovers in every slot, other padding: weight exactly 0, so equal bit for bit.
    poisoned = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e4), model.init_cache(3, SLOTS))
    dirty_BTV, _ = from_cache(model, TOKENS_BT, PROMPTS, poisoned, padding=VOCABULARY - 1)
    np.testing.assert_array_equal(dirty_BTV[known_BT], clean_BTV[known_BT])
    # Other companions, another row.
    mixed_BT = np.roll(TOKENS_BT, 1, axis=0)
    mixed_BT[0], mixed_BT[2] = 7, 9
    mixed_BTV, _ = from_cache(model, mixed_BT, (6, PROMPTS[0], 3), model.init_cache(3, SLOTS))
    assert error(mixed_BTV[1][known_BT[0]], clean_BTV[0][known_BT[0]]) <= EXACT


@pytest.mark.parametrize(
    "name", quick("gqa-window", slow=[name for name in CHANGED if name.endswith("-window")])
)
def test_pages_before_a_window_may_hold_anything(name):
    """One token, a few, and more than decode kernels take, up to the end of the last page."""
    layer, page, pages = model_of(name).blocks[0].attention, 5, 8  # a page is a tile of prefill
    x_BTD = np.float32(np.random.default_rng(6).standard_normal((1, 9, WIDTH)))

    @jax.jit
    def last_tokens(layer, x_BTD, content):
        start = pages * page - x_BTD.shape[1]
        unseen = (start - layer.config.window + 1) // page
        pool = layer.init_cache(pages, page, jnp.float32)
        pool = jax.tree.map(lambda leaf: (leaf + 0.5).at[:unseen].set(content), pool)
        return layer.decode(x_BTD, pool, jnp.array([start]), jnp.arange(pages)[None])[0]

    for T in (1, 7, 9):
        clean_BTD, foreign_BTD = (last_tokens(layer, x_BTD[:, :T], n) for n in (1.0, jnp.nan))
        assert np.isfinite(clean_BTD).all(), T
        np.testing.assert_array_equal(foreign_BTD, clean_BTD)


@pytest.mark.parametrize(
    ("name", "cache", "message"),
    [
        ("lrkv-full-odd_rank", ("mha", 3, None), "cache is a GroupedCache.* is a LowRankCache"),
        ("mha", ("mha", 2, None), r"k_BSGK is float32\[2, 16, 4, 8\], .* float32\[3, 16, 4, 8\]"),
        ("mha", ("mha", 3, jnp.int8), "k_BSGK is int8"),
        ("lrkv-full-odd_rank", ("lrkv-full-rank_0", 3, None), "rk_BSGR is None, .* float32"),
    ],
)
def test_another_models_cache_is_refused_in_one_line(name, cache, message):
    given, batch, dtype = cache
    cache = model_of(given).init_cache(batch, SLOTS, dtype)
    with pytest.raises(LrkvError, match=message) as error:
        model_of(name).decode(jnp.zeros((3, 1), jnp.int32), cache, jnp.zeros(3, jnp.int32))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_decode_equals_forward_for_every_shape_of_a_step_in_bfloat16(name):
    """1, 3 and 8 queries of 1 and 3 sequences: XLA on a CPU may lack a product that one of them is.

    An output is held against the whole sequence's in float32, within rounding.
    """
    layer, truth = (model_of(name, d).blocks[0].attention for d in ("bfloat16", "float32"))
    x_BTD = np.random.default_rng(5).standard_normal((3, 8, WIDTH)).astype(jnp.bfloat16)
    shapes = [(T, B) for T in (1, 3, 8) for B in (1, 3)]

    @jax.jit
    def first_tokens(layer, truth, x_BTD):
        """Decoded outputs of the first T tokens of B sequences, and the forward's of all."""
        decoded = []
        for T, B in shapes:
            cache = layer.init_cache(B, SLOTS, jnp.bfloat16)
            decoded.append(layer.decode(x_BTD[:B, :T], cache, jnp.zeros(B, int))[0])
        return decoded, truth(jnp.float32(x_BTD), jnp.broadcast_to(jnp.arange(8), (3, 8)))

    decoded, whole_BTD = first_tokens(layer, truth, x_BTD)
    for (T, B), out_BTD in zip(shapes, decoded, strict=True):
        assert error(out_BTD, whole_BTD[:B, :T]) <= 2**-5


FAR = "mha", "mla", "mla-full", "lrkv-shared-odd_rank", "lrkv-latent-even_rank"


@pytest.mark.parametrize("name", quick("lrkv-full-odd_rank", slow=FAR))
def test_decode_equals_forward_at_the_end_of_a_long_context(name):
    """The last token's heads from the cache and from what trains, within 2e-6 of the values'.

    Of the forward, softmax and averages are float64's: those of float32 over so many would be less
    exact than what is measured. A few tokens of six times the size are most of what is seen: of an
    average over all, the errors of angles cancel.
    """
    length = 131_072
    config = small(ALL[name], layers=1, qk_norm=False)
    layer = random_model(config).blocks[0].attention
    rng = np.random.default_rng(0)
    x_1SD = np.float32(0.3 * rng.standard_normal((1, length, WIDTH)))
    x_1SD[:, -1] *= 6
    x_1SD[:, rng.integers(0, length, 20)] *= 6
    positions_1S = jnp.arange(length)[None]

    @jax.jit
    def both(layer, x_1SD):
        new = layer.new_kv(x_1SD, positions_1S)
        cache = write(layer.init_cache(1, length, jnp.float32), new, positions_1S, None)
        last = x_1SD[:, -1:], positions_1S[:, -1:]
        query, angles = layer.queries(*last), layer.slot_angles(length)
        decoded_11HK, _ = layer.attend_cached(query, cache, last[1], angles)
        return decoded_11HK, layer.attend_full(x_1SD, positions_1S, lambda *qkv: qkv)

    decoded_11HK, qkv = both(layer, x_1SD)
    q_1SHW, k_1SGW, v_1SGK = map(np.float64, qkv)
    truth_HK = attend_last(q_1SHW, k_1SGW, v_1SGK, layer.scale)
    sizes_HK = attend_last(q_1SHW, k_1SGW, np.abs(v_1SGK), layer.scale)
    error = np.abs(decoded_11HK[0, 0] - truth_HK).max() / sizes_HK.max()
    assert error <= 2e-6


def attend_last(q_1SHW, k_1SGW, v_1SGK, scale):
    """The last query's attention over all keys."""
    q_HW, G = q_1SHW[0, -1], k_1SGW.shape[2]
    logits_GNS = scale * np.einsum("GNW,SGW->GNS", q_HW.reshape(G, -1, q_HW.shape[-1]), k_1SGW[0])
    weights_GNS = np.exp(logits_GNS - logits_GNS.max(-1, keepdims=True))
    weights_GNS /= weights_GNS.sum(-1, keepdims=True)
    return np.einsum("GNS,SGK->GNK", weights_GNS, v_1SGK[0]).reshape(len(q_HW), -1)
