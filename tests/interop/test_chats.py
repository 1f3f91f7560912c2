"""An imported model is asked as its author asks it: its chat template, and its own first token."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.chat_folders import FOLDERS, first
from support.hand_built import CHATS
from support.hf_folders import RECORDED, hf_folder, tokenizer_json, write
from support.planted_models import LLAMA, drawn, plant

from lrkv_jax.config import load_config
from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.chat_template import ChatTemplate
from lrkv_jax.data.conversation import Conversation, Message, Part, conversation_from, text_message
from lrkv_jax.data.mixture import packed
from lrkv_jax.data.tokenizer import CHAT_NAMES, foreign_tokenizer, load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.harness_requests import ChatPrompt
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.chat import Chat
from lrkv_jax.inference.language_model import LanguageModel
from lrkv_jax.interop.export import export
from lrkv_jax.interop.importing import import_model
from lrkv_jax.interop.tokenizer_files import TEMPLATE
from lrkv_jax.serving.request_schema import ChatRequest
from lrkv_jax.training.restore import load_run

SAID = json.loads((Path(__file__).parent / "recorded_chats.json").read_text())
OF = SAID["of"]
TURNS = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "Then"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("chats")
    return {name: make(made / name) for name, make in FOLDERS.items()}


@pytest.fixture
def imported(tmp_path, folders, loaded_on_one_device):
    """A tiny run with a tokenizer and a template."""

    def make(name="chatml"):
        said, folder = RECORDED["smollm2"], tmp_path / name
        shutil.copytree(folders[name], folder)
        (folder / "config.json").write_text(json.dumps(said["config"]))
        write(folder, drawn(said["shapes"]))
        more = ["train.seq_len=160"]
        import_model(str(folder), tmp_path / f"{name}.run", more, say=lambda _: None)
        return load_run(tmp_path / f"{name}.run")

    return make


@pytest.mark.parametrize(
    ("name", "refused", "ends"),
    [("chatml", 0, {262, 264}), ("blocks", 5, {262, 263}), ("inst", 11, {257, 258})],
)
def test_chats_and_texts_have_the_ids_that_transformers_gives_them(name, refused, ends, folders):
    tokenizer, recorded = foreign_tokenizer(str(folders[name])), OF[name]
    rendered = zip(recorded["chats"], recorded["chat_ids"], strict=True)
    chat = ChatFormat(tokenizer)
    assert set(tokenizer.eos_token_ids) <= set(chat.eos_token_ids) == ends, (
        "an answer ends where the model says"
    )
    assert len(SAID["messages"]) == 60 and len(SAID["texts"]) == 500
    for turns, (text, ids) in zip(SAID["messages"], rendered, strict=True):
        conversation = conversation_from(turns)
        if text is None:
            refused -= 1
            with pytest.raises(LrkvError, match="chat template refuses the conversation") as raised:
                chat.prompt(conversation)
            assert "\n" not in str(raised.value)
            continue
        assert chat.shown(conversation) == text
        assert chat.prompt(conversation) == ids
    assert refused == 0
    for text, ids in zip(SAID["texts"], recorded["text_ids"], strict=True):
        assert tokenizer.prompt(text) == (ids or [tokenizer.prefix])


@pytest.mark.parametrize("name", FOLDERS)
def test_no_text_forges_a_token_of_a_template(name, folders):
    chat = ChatFormat(foreign_tokenizer(str(folders[name])))
    special = json.loads((folders[name] / "tokenizer.json").read_text())["added_tokens"]
    names = [token["content"] for token in special if token["special"]]

    def prompt(text):
        ids = chat.prompt(Conversation((text_message("user", text),)))
        return [i for i in ids if not chat.tokenizer.token_bytes[i]], ids

    for text in (*names, "".join(names), f"a{names[-1]}b", f"\ufdd0{names[-1]}\ufdd1"):
        framing, ids = prompt(text)
        assert framing == prompt("a")[0], text
        assert text.strip("\ufdd0\ufdd1") in chat.tokenizer.decode(ids)
    template = ChatTemplate("x", "{{ messages[0].x }}</s>{{ messages[1].x }}", {}, ["</s>"])
    rendered = template.render([{"x": "a\ufdd0"}, {"x": "\ufdd1b"}], answers=False)
    assert list(template.stretches(rendered)) == [("a</s>b", False)], "two messages together"


def test_a_prompt_has_no_bos_where_its_tokenizer_puts_none(imported):
    run = imported("chatml")
    words = run.tokenizer.encode("The Union").tolist()
    assert run.ids("The Union") == words
    model = LanguageModel(run, batch=2)
    assert model.pair("The", " Union") == (words[:3], words[3:])
    assert model.pair("", "The Union") == ([263], words)  # its bos_token, as the harness's own
    whole = imported("blocks")
    assert whole.ids("The Union")[0] == 262


def test_generate_serve_and_the_harness_ask_by_the_template(imported):
    run = imported("chatml")
    expected = ChatFormat(run.tokenizer).prompt(conversation_from(TURNS))
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TURNS)
    assert expected == run.tokenizer.encode_framed(f"{text}<|im_start|>assistant\n")
    model = LanguageModel(run, batch=2)
    assert model.chat_prompt(conversation_from(TURNS)) == expected
    asked = ChatPrompt.of(model.chat, TURNS)
    assert list(asked.head) == expected and asked == f"{text}<|im_start|>assistant\n"
    more = [*TURNS, {"role": "assistant", "content": "It"}]
    begun = ChatPrompt.of(model.chat, more, answers=False)
    assert list(begun.head) == expected and begun.begun == "It"
    # An answer that a server left empty comes back to it.
    body = ChatRequest.model_validate({"messages": [*TURNS, {"role": "assistant", "content": ""}]})
    assert ChatFormat(run.tokenizer).prompt(body.conversation()) == expected


def test_an_empty_answer_leaves_no_two_turns_of_the_user(folders):
    """Templates that ask for turns by turns refused every message after one."""
    chat = ChatFormat(foreign_tokenizer(str(folders["inst"])))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    again = [*turns, {"role": "user", "content": "Again"}]
    expected = chat.prompt(Conversation((text_message("user", "Hi\n\nAgain"),)))
    body = ChatRequest.model_validate({"messages": again})
    assert chat.prompt(body.conversation()) == expected
    stopped = SimpleNamespace(_format=chat, messages=turns, _sequence=None)
    assert Chat._turn(stopped, "Again") == (0, expected)
    with pytest.raises(LrkvError, match="roles must alternate"):
        chat.prompt(conversation_from([turns[0], again[-1]]))


@pytest.mark.slow
def test_a_chats_turns_are_the_templates_whole_conversation(imported):
    run = imported("chatml")
    chat = Chat(run, sampling=Sampling(temperature=0), max_new_tokens=3)
    form = ChatFormat(run.tokenizer)
    for number, text in enumerate(("a", "b")):
        answer = "".join(chat.say(text))
        messages = chat.messages[: 2 * number + 1]
        prompt = form.prompt(conversation_from([m for m in messages if m["content"]]))
        assert chat._sequence.tokens[: len(prompt)] == prompt, number
        assert chat.messages[-1] == {"role": "assistant", "content": answer}
    used = chat.used
    assert used > len(form.prompt(Conversation((text_message("user", "a"),))))
    chat.messages[0]["content"], chat.max_new_tokens = "another", 0
    with pytest.raises(LrkvError, match="tokens = 0"):
        next(chat.say("c"))
    assert chat.used == used


def test_what_the_assistant_says_is_the_target_of_a_template(folders):
    chat = ChatFormat(foreign_tokenizer(str(folders["chatml"])))
    text, began = DataConfig(), DataConfig(chats=True)
    assert chat.trained(text)
    for ours in map(ChatFormat, map(load_tokenizer, ("sotu-4096", "gpt2"))):
        assert ours.trained(began) and not ours.trained(text)
    conversation = conversation_from([*TURNS, {"role": "assistant", "content": "No"}])
    ids, counted = chat.render(conversation, "assistant")
    same, every = chat.render(conversation)
    np.testing.assert_array_equal(ids, same)
    assert every.all() and chat.tokenizer.decode(ids[counted]) == "HoNo"
    assert (ids[counted] == 264).sum() == 2, "and the tokens that end it"
    call = Message("assistant", (Part("python", "1+1"), Part("output", "2")))
    with pytest.raises(LrkvError, match="no tokens for the calculator"):
        chat.render(Conversation((text_message("user", "?"), call)))
    sets = [{"task": "smoltalk", "split": "train"}, {"task": "gsm8k", "split": "train"}]
    data = DataConfig(mixture={"folder": "demo", "train": sets, "heldout": sets[:1]})
    with pytest.raises(LrkvError, match=r"data.mixture.train, gsm8k: .* calculator: leave out"):
        packed(data, "train", 64, chat.tokenizer)
    marked = [ChatFormat(foreign_tokenizer(str(f))).marks_its_start for f in folders.values()]
    assert marked == [False, True, False]  # chatml, blocks, inst
    assert ChatFormat(load_tokenizer("sotu-4096")).marks_its_start


@pytest.mark.parametrize("name", FOLDERS)
def test_an_export_gives_the_template_back(name, imported, tmp_path, folders):
    imported(name)
    export(tmp_path / f"{name}.run", tmp_path / "again")
    for path in folders[name].iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("begins", [False, True])
def test_an_imported_model_that_was_trained_to_chat_here_leaves_with_its_chat(
    begins, tmp_path, loaded_on_one_device
):
    """Its tokenizer had neither a template nor the chat's tokens."""
    first_token = {"post_processor": first("<|endoftext|>", 256)} if begins else {}
    folder = hf_folder(tmp_path / "hf", "smollm2", eos_token_id=2)
    (folder / "tokenizer.json").write_text(tokenizer_json("<|endoftext|>", **first_token))
    import_model(str(folder), tmp_path / "base", say=lambda _: None)
    own = f"data.tokenizer={tmp_path / 'base/tokenizer'}"
    plant(tmp_path / "run", "attention=mha", *LLAMA, "model.vocabulary=272", own, CHATS)
    export(tmp_path / "run", tmp_path / "out")
    added = json.loads((tmp_path / "out/tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added if token["special"]}
    chat = ChatFormat(load_run(tmp_path / "run").tokenizer)
    assert [ids[name] for name in CHAT_NAMES] == list(vars(chat.ids).values())
    for name in ("config.json", "generation_config.json"):
        ends = json.loads((tmp_path / "out" / name).read_text())["eos_token_id"]
        assert ends == list(chat.eos_token_ids) and ends[0] == chat.ids.assistant_end
    back, expected = foreign_tokenizer(str(tmp_path / "out")), chat.prompt(conversation_from(TURNS))
    rendered = back.template.render(TURNS, answers=True)
    assert back.encode_framed(rendered) == expected and (expected[0] == 256) == begins
    assert ChatFormat(back).prompt(conversation_from(TURNS)) == expected
    one_of_them = tokenizer_json("<|endoftext|>", "<|user_start|>", **first_token)
    (tmp_path / "base/tokenizer/tokenizer.json").write_text(one_of_them)
    with pytest.raises(LrkvError, match=r"makes <\|user_start\|> 257, and the run .* as 258:"):
        export(tmp_path / "run", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('two\nlines') }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
    ],
)
def test_a_template_stays_in_its_sandbox_and_its_errors_are_one_line(source):
    template = ChatTemplate("x", source, {}, [])
    with pytest.raises(LrkvError, match="refuses the conversation") as raised:
        template.render([{"role": "user", "content": "a"}], answers=True)
    assert "\n" not in str(raised.value)


def test_templates_have_the_time_and_what_transformers_gives_them():
    source = (
        "{{ strftime_now('%Y')|length }}{{ [1, '<é>']|tojson }}{{ tools is none }}{{ bos_token }}"
        "{{ dict(a=1).a }}{% generation %}x{% endgeneration %}"
    )
    template = ChatTemplate("x", source, {"bos_token": "<s>"}, [])
    assert template.render([], answers=False) == '4[1, "<é>"]True<s>1x'


def test_a_run_of_ours_that_comes_back_has_its_calculator(
    tmp_path, monkeypatch, loaded_on_one_device
):
    plant(tmp_path / "run", "attention=gqa", "model.vocabulary=4224", CHATS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sotu-4096").mkdir()  # the name is the package's tokenizer all the same
    healed = load_config("heal", [f"init_from={tmp_path / 'run'}"]).data
    assert healed.mixture is None and healed.chats
    export(tmp_path / "run", tmp_path / "hf")
    import_model(str(tmp_path / "hf"), tmp_path / "back", say=lambda _: None)
    parts = (Part("python", "1+1"), Part("output", "2"), Part("text", "2."))
    opening = text_message("system", "S"), text_message("user", "?")
    asked = Conversation((*opening, Message("assistant", parts)))
    ours, back = (ChatFormat(load_run(tmp_path / name).tokenizer) for name in ("run", "back"))
    for loss in ("all", "assistant"):
        for one, other in zip(ours.render(asked, loss), back.render(asked, loss), strict=True):
            np.testing.assert_array_equal(one, other)
    assert back.prompt(asked.unanswered()) == ours.prompt(asked.unanswered())
    assert back.tokenizer.template.source == TEMPLATE
