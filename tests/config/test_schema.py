"""What a configuration is: frozen, checked wherever it is built, and the paper's as shipped."""

import copy
import pickle

import pydantic
import pytest

from lrkv_jax.config import MeshConfig, ModelConfig, load_config
from lrkv_jax.config.attention import VARIANTS, AttentionConfig, variant_class
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import GQA, LRKV, MHA, MLA, MQA
from lrkv_jax.models.attention.base import Attention

SHAPE = {"layers": 2, "width": 24, "heads": 6, "head_width": 4, "vocabulary": 11}


# Table "architecture": layers, width, heads; then KV heads, latent, rank; context, batch, tokens.
PAPER = {
    "128m": ((12, 768, 6), (3, 128, 46), (2048, 16, 100_000_000_000)),
    "512m_8k": ((24, 1536, 12), (4, 256, 51), (8192, 4, 50_000_000_000)),
    "1.2b": ((24, 1536, 12), (4, 256, 51), (2048, 16, 50_000_000_000)),
    "2.5b": ((36, 2304, 18), (6, 384, 55), (2048, 16, 50_000_000_000)),
    "6.3b": ((32, 4096, 32), (2, 1024, 54), (2048, 16, 50_000_000_000)),
}


DEEPSEEK = LRKV(rank=46, rope="shared", latent_norm="joint")


@pytest.mark.parametrize("scale", PAPER)
def test_the_papers_settings_stand_in_each_yaml(scale):
    (layers, width, heads), (kv_heads, latent, rank), (context, batch, tokens) = PAPER[scale]
    config = load_config(scale)
    model, optimizer, train = config.model, config.optimizer, config.train
    assert (config.name, config.data.tokenizer, config.attention) == (scale, "gpt2", "lrkv")
    assert (model.layers, model.width, model.heads) == (layers, width, heads)
    assert (model.head_width, model.vocabulary) == (128, 50304)
    assert (model.feed_forward_width, model.activation) == (4 * width, "relu2")
    assert model.qk_norm and not model.norm_gain and not model.tied_head
    assert (model.softcap, model.rope_base) == (15.0, 10_000.0)
    assert config.variants == {
        "mha": MHA(),
        "gqa": GQA(kv_heads=kv_heads),
        "mqa": MQA(),
        "mla": MLA(kv_lora_rank=latent, qk_rope_head_dim=64),
        "lrkv": LRKV(rank=rank, rope="full"),
        "lrkv_latent": LRKV(rank=rank + rank % 2, rope="latent"),
        **({"lrkv_deepseek": DEEPSEEK} if scale == "128m" else {}),
    }
    rates = (optimizer.matrix_lr, optimizer.embedding_lr, optimizer.head_lr)
    assert rates == (0.02, 0.2, 0.004)
    assert (optimizer.beta1, optimizer.beta2, optimizer.grad_clip) == (0.9, 0.95, 1.0)
    decays = (optimizer.matrix_decay, optimizer.head_decay, optimizer.embedding_decay)
    assert decays == (0.1, 0.1, 0.0)
    assert (optimizer.schedule, optimizer.warmup_steps) == ("cosine", 2000)
    assert (train.seq_len, train.global_batch_size, train.tokens) == (context, batch, tokens)
    assert train.seq_len * train.global_batch_size == 32_768
    assert train.total_steps == tokens // 32_768
    for name, entry in config.variants.items():
        assert config.variant(name).model.attention == entry
        assert config.variant(name).directory == f"runs/{scale}-{name}"


def test_settings_cannot_be_changed_and_a_mistake_in_python_is_one_line_too():
    config = load_config("128m")
    for part, key in ((config, "name"), (config.model.attention, "rank"), (config.train, "extra")):
        with pytest.raises(pydantic.ValidationError):
            setattr(part, key, 1)
    for key, value, said in (
        ("hidden_size", 64, "unknown key hidden_size: use width"),
        ("num_key_value_heads", 2, "unknown key num_key_value_heads: use attention.kv_heads"),
        ("laiers", 2, "unknown key laiers: did you mean layers?"),
        ("heads", "four", "heads = 'four' should be a valid integer"),
    ):
        with pytest.raises(LrkvError) as caught:
            ModelConfig(**SHAPE | {key: value}, attention=MHA())
        assert str(caught.value) == f"ModelConfig: {said}"
    # A variant's keys are its class's, wherever it stands.
    typo = {"kind": "lrkv", "rank": 8, "rnak": 3}
    for make, said in (
        (lambda: LRKV(**typo), "LRKV: unknown key rnak"),
        (lambda: AttentionConfig(**typo), "AttentionConfig: unknown key rnak"),
        (lambda: ModelConfig(**SHAPE, attention=typo), "ModelConfig: unknown key attention.rnak"),
    ):
        with pytest.raises(LrkvError, match=f"^{said}: did you mean rank"):
            make()
    with pytest.raises(LrkvError, match="mesh"):
        MeshConfig(tensor=-2)
    assert MeshConfig(data=-1, fsdp=1).data == -1  # one axis may take what is left


def test_an_entry_is_made_by_its_kind():
    made = AttentionConfig(kind="lrkv", rank=8)
    assert made == LRKV(rank=8) and copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(LrkvError, match="^kind None is unknown: use one of mha"):
        AttentionConfig(rank=8)
    with pytest.raises(LrkvError, match="^kind lrvk is unknown: did you mean lrkv"):
        AttentionConfig(kind="lrvk")
    with pytest.raises(LrkvError, match="kind = gqa is not MHA: its kind is mha"):
        MHA(kind="gqa")
    for kind in VARIANTS:
        entry = variant_class(kind)
        assert entry.own_kind() == kind == entry.name
        assert issubclass(entry.layer_class(), Attention)
        # Without rotations a variant has a spare style.
        assert not entry.modes() or {*entry.styles} == {*entry.modes()} - {"none"}


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (LRKV(rank=5), r"attention.rank = 5 .* head_width = 4: use 0 \(MQA\) to 4"),
        (LRKV(rank=0, rank_key=2), "attention.rank = 0 is MQA, which has no residuals: leave out"),
        (LRKV(rank=2, kv_heads=4), "attention.kv_heads = 4 does not divide heads = 6"),
        (GQA(kv_heads=4), r"attention.kv_heads = 4 .* heads = 6: use 1, 2, 3 or 6$"),
        (LRKV(rank=2, latent_norm="joint"), "joint is of rope: shared with rank 1 or more: set"),
        (LRKV(rank=0, rope="shared", latent_norm="joint"), "joint .*latent_norm=none$"),
        (MLA(kv_lora_rank=3, rank=5), r"rank = 5 .* head_width = 4: use 0 \(no latents of"),
        (MLA(kv_lora_rank=3, qk_rope_head_dim=5), "qk_rope_head_dim = 5 is odd.* use 4 or 6$"),
        (MLA(kv_lora_rank=3, kv_heads=2), "attention.kv_heads is of rope: full: leave it"),
        (MLA(kv_lora_rank=3, latent_norm=False), "latent_norm is of rope: full: leave it out"),
        (MLA(kv_lora_rank=3, rope="full", kv_heads=4), "kv_heads = 4 does not divide heads"),
    ],
)
def test_impossible_shapes_are_refused_from_python_too(attention, message):
    with pytest.raises(LrkvError, match=message):
        ModelConfig(**SHAPE, attention=attention)


def test_an_odd_width_that_is_rotated_is_said_and_no_other():
    said = "attention.rank = 51: odd, so in rope: latent the last coordinate of each latent carries"
    assert LRKV(rank=51, rope="latent").warning.startswith(said)
    assert "rank_key = 5:" in LRKV(rank=6, rank_key=5, rope="latent").warning
    even = LRKV(rank=50, rope="latent"), LRKV(rank=6, rank_value=5, rope="latent")
    for entry in (*even, LRKV(rank=51, rope="full"), MLA(kv_lora_rank=33, rope="full")):
        assert not entry.warning


MLA_9 = MLA(kv_lora_rank=9, rope="full", kv_heads=3, latent_norm=False)


@pytest.mark.parametrize(
    ("entry", "size", "label", "mode"),
    [
        (MHA(), None, "MHA", "full"),
        (GQA(kv_heads=3, rope="none"), 3, "GQA-3 rope none", "none"),
        (MLA(kv_lora_rank=128, rank=4), 128, "MLA-128 rank 4", "decoupled"),
        (MLA_9, 9, "MLA-9 rope full, in 3 groups, no latent norm", "full"),
        (LRKV(rank=8, rope="shared"), 8, "LRKV-8 rope shared", "shared"),
        (LRKV(rank=6, rank_value=5), 6, "LRKV-6/5", "full"),
        (LRKV(rank=8, rank_key=4, rank_value=4), 8, "LRKV-4", "full"),
        (DEEPSEEK, 46, "LRKV-46 rope shared, joint norm", "shared"),
    ],
)
def test_an_entry_says_its_size_label_and_mode(entry, size, label, mode):
    assert (entry.size, entry.label, entry.mode) == (size, label, mode)
