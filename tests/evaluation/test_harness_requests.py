"""The harness's requests, read without it: their order, settings, and chats that none can forge."""

import copy
import pickle
import sys

import pytest

from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import conversation_from
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.harness_requests import (
    OPENING,
    ChatPrompt,
    GenerationSettings,
    lost_chat,
)
from lrkv_jax.inference import Sampling

CHAT = ChatFormat(load_tokenizer("sotu-4096"))


@pytest.mark.parametrize(
    ("asked", "until", "new_tokens", "sampling"),
    [
        ({}, (), 256, Sampling(0.0)),
        ({"until": "\n", "num_beams": 1}, ("\n",), 256, Sampling(0.0)),
        ({"until": ["a", "", "b"], "max_gen_toks": 9}, ("a", "b"), 9, Sampling(0.0)),
        ({"until": None, "max_new_tokens": "7"}, (), 7, Sampling(0.0)),
        ({"max_gen_toks": 5, "max_tokens": 6}, (), 5, Sampling(0.0)),
        ({"temperature": 0.5, "top_p": 0.9}, (), 256, Sampling(0.5, 0, 0.9)),
        ({"temperature": 0.5, "do_sample": False}, (), 256, Sampling(0.0)),
        ({"do_sample": True}, (), 256, Sampling(1.0)),
        ({"do_sample": True, "temperature": 1, "top_k": 3}, (), 256, Sampling(1.0, 3)),
    ],
)
def test_settings_of_texts_are_read_as_the_harness_reads_them(asked, until, new_tokens, sampling):
    before = copy.deepcopy(asked)
    assert GenerationSettings.of(asked, 1024) == GenerationSettings(until, new_tokens, sampling)
    assert asked == before


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"num_beams": 10}, "generation_kwargs num_beams: not known here"),
        ({"repetition_penalty": 1.2}, "generation_kwargs repetition_penalty: not known here"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample at temperature = 0"),
        ({"max_gen_toks": 2048}, "reads 1024 tokens, so give --gen_kwargs max_gen_toks=N of 1 to"),
        ({"max_gen_toks": 0}, "max_gen_toks = 0"),
        ({"top_p": 0}, "top_p = 0"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_in_a_line(asked, line):
    with pytest.raises(LrkvError, match=line) as refused:
        GenerationSettings.of(asked, 1024)
    assert "\n" not in str(refused.value)


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is ice?"},
    {"role": "assistant", "content": "Water."},
    {"role": "user", "content": "And steam?"},
]


def test_a_chat_travels_as_its_ids_and_a_string_for_logs():
    prompt = ChatPrompt.of(CHAT, HISTORY)
    assert list(prompt.head) == CHAT.prompt(conversation_from(HISTORY)) and prompt.begun == ""
    assert prompt == (
        "<|user_start|>Be brief.\n\nWhat is ice?<|user_end|>"
        "<|assistant_start|>Water.<|assistant_end|>"
        "<|user_start|>And steam?<|user_end|><|assistant_start|>"
    )
    history = [*HISTORY, {"role": "assistant", "content": "It is"}]
    begun = ChatPrompt.of(CHAT, history, answers=False)
    assert (begun.head, begun.begun) == (prompt.head, "It is") and begun == f"{prompt}It is"
    with pytest.raises(LrkvError, match="ends with an answer"):
        ChatPrompt.of(CHAT, history)


def test_a_chat_survives_the_harness_caches_and_one_that_lost_its_ids_is_told():
    prompt = ChatPrompt.of(CHAT, HISTORY)
    opening = prompt[:OPENING]
    for other in (copy.deepcopy(prompt), pickle.loads(pickle.dumps(prompt))):
        assert (other, other.head, other.begun) == (prompt, prompt.head, prompt.begun)
        assert not lost_chat(other, opening)
    assert lost_chat(prompt + " ", opening) and lost_chat(f"{prompt}", opening)
    assert not lost_chat("What is ice?", opening) and not lost_chat("", opening)


def test_without_the_harness_one_line_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lrkv_jax.evaluation.harness_adapter", raising=False)
    with pytest.raises(LrkvError, match=r'pip install .* "\.\[harness\]"') as told:
        import lrkv_jax.evaluation.harness_adapter  # noqa: F401
    assert "\n" not in str(told.value)
