"""Models whose weights are made by hand: they say what they are made to say, whatever is asked.

A model's stream passes every layer unchanged (output projections of zero), so the next token
depends on the last one alone: with the embedding's rows as coordinates of their own, the head's
columns spell a table from token to token.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from support.variants import FIVE, random_params, small

from lrkv_jax.config import load_config
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.tokenizer import Tokenizer, load_tokenizer
from lrkv_jax.inference.language_model import LanguageModel
from lrkv_jax.inference.trained_run import TrainedRun

WIDTH = 24  # of all of them, so that they share their compiled programs


def follows(
    tokenizer: Tokenizer,
    table: Mapping[int, int],
    *,
    noise: float = 0.0,
    strength: float = 20.0,
):
    """(config, params) of a model in which token b = table[a] follows a, by far.

    Every other token is followed by BOS. `noise` adds attention and a random head: likelihoods then
    depend on the whole text, and the table still wins. A logit of the table is `strength` times
    sqrt(width).
    """
    chat = ChatFormat(tokenizer)
    width = WIDTH
    assert len(table) < width, "each token of the table has a coordinate of its own, and BOS one"
    config = small(FIVE["lrkv"], width=width, vocabulary=chat.vocabulary, softcap=None, layers=1)
    params = jax.tree.map(np.array, random_params(config))
    blocks = params["blocks"]
    blocks["attention"]["output"] *= noise
    blocks["mlp"] = jax.tree.map(lambda leaf: leaf * noise, blocks["mlp"])
    table_VD = params["embedding"]["table"]
    table_VD[:] = 0
    table_VD[:, -1] = 1  # all that the table does not name
    head_DV = params["head"]["kernel"]
    head_DV *= noise
    head_DV[-1, tokenizer.bos] += strength
    for place, (token, after) in enumerate(table.items()):
        table_VD[token] = np.eye(width)[place]
        head_DV[place, after] += strength
    return config, jax.tree.map(jnp.asarray, params)


def says(tokenizer: Tokenizer, text: str):
    """(config, params) of a model that answers any chat with `text`, whose tokens differ."""
    chat = ChatFormat(tokenizer)
    ids = [chat.ids.assistant_start, *tokenizer.encode(text).tolist(), chat.ids.assistant_end]
    assert len(set(ids)) == len(ids), "a token that comes twice cannot be followed by two others"
    return follows(tokenizer, dict(zip(ids, ids[1:], strict=False)))


def language_model(tokenizer, made, *, batch=4, context=512, mesh=None):
    run = a_run(*made, context, mesh, chats=True)
    vars(run)["tokenizer"] = tokenizer
    return LanguageModel(run, batch=batch)


# Of a run that was trained to chat.
_SETS = "[{task: gsm8k, split: test}]"
CHATS = f"data.mixture={{folder: demo, train: {_SETS}, heldout: {_SETS}}}"


def a_run(config, params, context=128, mesh=None, chats=False):
    """A trained run of these parameters, which reads `context` tokens; `chats`: conversations."""
    settings = [f"train.seq_len={context}", "run_dir=runs/it", *[CHATS] * chats]
    run = load_config("configs/quickstart.yaml", settings)
    return TrainedRun(run.model_copy(update={"model": config}), 7, params, mesh)


def calling_run():
    """Calls the calculator with 4*5, and after its output says "."."""
    tokenizer = load_tokenizer("sotu-4096")
    ids = ChatFormat(tokenizer).ids
    call = [
        ids.assistant_start,
        ids.python_start,
        *tokenizer.encode("4*5").tolist(),
        ids.python_end,
    ]
    end = [ids.output_end, *tokenizer.encode(".").tolist(), ids.assistant_end]
    pairs = [p for part in (call, end) for p in zip(part, part[1:], strict=False)]
    return a_run(*follows(tokenizer, dict(pairs)), chats=True)
