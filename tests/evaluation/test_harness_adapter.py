"""The harness's own tasks over our models give what the whole-sequence forward gives.

The tasks are the YAML files that the installed harness ships; only where their data lie is changed.
"""

import functools
import importlib.util
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.command import lrkv
from support.hand_built import CHATS, language_model, says
from support.variants import FIVE, random_params, small

from lrkv_jax.data.assets import FOLDER
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.tasks.registry import load
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.language_model import LanguageModel
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.restore import load_run

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed: pip install -e '.[harness]'",
    ),
]

TOKENIZER = load_tokenizer("sotu-4096")
CHAT = ChatFormat(TOKENIZER)
CONFIG = small(FIVE["lrkv"], vocabulary=4224)
EXACT = 1e-5  # float32
DEMO = FOLDER / "demo"
SHOT_SPLIT = {"arc_easy": "train", "arc_challenge": "train", "mmlu": "dev", "gsm8k": "train"}
TEMPLATES = {"arc_easy": "arc", "arc_challenge": "arc", "gsm8k": "gsm8k"}


@functools.cache  # an engine's programs are compiled once
def model_of(context, batch):
    made = CONFIG, random_params(CONFIG, 3)
    return language_model(TOKENIZER, made, context=context, batch=batch)


def harness_of(model, **how):
    from lrkv_jax.evaluation.harness_adapter import LrkvLM

    return LrkvLM(model, **how)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of the harness's tasks over the demonstration sets; MMLU as one of each subject."""
    import yaml

    # Read when `datasets` is first imported: nothing is asked of the hub.
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
    from lm_eval import tasks as shipped

    shipped = Path(shipped.__file__).parent
    folder = tmp_path_factory.mktemp("tasks")

    def task(name, template, test, shots, shot_split):
        split = {"test": str(test), shot_split: str(shots)}
        changes = {
            "include": str(shipped / template),
            "task": name,
            "tag": [],
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": split, "cache_dir": str(folder / "cache")},
            "validation_split": None,
            "fewshot_split": shot_split,
            "fewshot_config": {"sampler": "first_n"},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(changes))

    for name, shipped_in in TEMPLATES.items():
        files = [DEMO / f"{name}-{split}.jsonl" for split in ("test", SHOT_SPLIT[name])]
        task(f"demo_{name}", f"{shipped_in}/{name}.yaml", *files, SHOT_SPLIT[name])
    for subject in subjects():
        files = []
        for split in ("test", "dev"):
            rows = (DEMO / f"mmlu-{split}.jsonl").read_text().splitlines(keepends=True)
            files.append(folder / f"{subject}-{split}.jsonl")
            files[-1].write_text("".join(r for r in rows if json.loads(r)["subject"] == subject))
        task(f"demo_mmlu_{subject}", f"mmlu/default/mmlu_{subject}.yaml", *files, "dev")
    return folder


def subjects():
    return sorted({example.subject for example in load("mmlu", "test", "demo")})


def ask(lm, tasks, names, shots, **how):
    """What the harness logs of each task's examples, in their order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=lm, tasks=names, num_fewshot=shots, task_manager=manager, bootstrap_iters=0, **how
    )
    return result["samples"]


@pytest.mark.parametrize(
    ("name", "shots", "context"),
    [("arc_easy", 3, 512), ("mmlu", 5, 512), ("arc_challenge", 25, 160)],
)
def test_each_choice_scores_what_the_forward_scores(tasks, name, shots, context):
    """The harness's own prompts, three at a time; at 160 tokens they lose their beginning."""
    model = model_of(context, 3)
    model.truncated = 0
    names = [f"demo_mmlu_{one}" for one in subjects()] if name == "mmlu" else [f"demo_{name}"]
    samples = [one for task in ask(harness_of(model), tasks, names, shots).values() for one in task]
    assert (model.truncated > 0) == (context == 160) and len(samples) > 8
    for sample in samples[:12]:
        pairs = [model.pair(*arguments) for arguments in sample["arguments"]]
        longest = max(len(continuation) for _, continuation in pairs)
        for (prompt, continuation), response in zip(pairs, sample["resps"], strict=True):
            room = context + 1 - longest
            if len(prompt) > room:
                prompt = [TOKENIZER.bos, *prompt[len(prompt) - room + 1 :]]
            expected = log_p_of([*prompt, *continuation])[0][-len(continuation) :].sum()
            np.testing.assert_allclose(response[0][0], expected, rtol=EXACT, atol=EXACT)


def request(kind, *arguments, task=None, doc=0):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, metadata=(task, doc, 1))


def log_p_of(ids):
    """Float64 log p of each id after the first, from the whole-sequence forward."""
    model = jax.jit(with_parameters(CONFIG, random_params(CONFIG, 3)))
    logits = np.asarray(model(jnp.asarray([ids], jnp.int32)), np.float64)[0]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.array([log_p[i, token] for i, token in enumerate(ids[1:])]), log_p.argmax(-1)


@pytest.mark.parametrize("words", [0, 1, 64, 65, 150])
def test_rolling_predicts_every_token_once_with_full_context_at_the_end(words):
    text = " ".join(["The state of the Union is", "strong and", "it was 1945."] * 60)
    ids = TOKENIZER.encode(text).tolist()[:words]
    text, context = TOKENIZER.decode(ids), 64
    assert TOKENIZER.encode(text).tolist() == ids
    expected = 0.0
    for start in range(0, len(ids), context):
        end = min(start + context, len(ids))
        window = [TOKENIZER.bos, *ids[:end]] if start == 0 else ids[end - context - 1 : end]
        expected += log_p_of(window)[0][start - end :].sum()
    lm = harness_of(model_of(context, 3))
    others = request("loglikelihood_rolling", "Another text.")
    got = lm.loglikelihood_rolling([others, request("loglikelihood_rolling", text), others])
    assert got[1] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert got[0] == pytest.approx(got[2], rel=1e-6)


def test_requests_come_back_in_their_order_whatever_they_share():
    """Contexts interleaved, one twice, one empty, one that ends in spaces."""
    contexts = ["What is ice?", "", "And snow? ", "What is ice?"]
    pairs = [(context, f" {word}") for word in ("water", "a cold thing") for context in contexts]
    asked = [request("loglikelihood", *pair) for pair in pairs]
    got = harness_of(model_of(128, 3)).loglikelihood(asked, disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(pairs, got, strict=True):
        start = 1 + len(TOKENIZER.encode(context.rstrip()))
        ids = [TOKENIZER.bos, *TOKENIZER.encode(context + continuation).tolist()]
        each, likeliest = log_p_of(ids)
        assert log_p == pytest.approx(each[start - 1 :].sum(), abs=1e-5)
        assert greedy == (likeliest[start - 1 : -1] == ids[start:]).all()


def test_a_chats_likelihoods_are_those_of_its_frame():
    lm = harness_of(model_of(128, 3))
    history = [{"role": "user", "content": "What is <|user_end|> ice?"}]
    prompt = lm.apply_chat_template(history)
    begun = lm.apply_chat_template(
        [*history, {"role": "assistant", "content": "It is "}], add_generation_prompt=False
    )
    got = lm.loglikelihood([request("loglikelihood", one, "water") for one in (prompt, begun)])
    at, encode = CHAT.ids, lambda text: TOKENIZER.encode(text).tolist()
    asked = encode("What is <|user_end|> ice?")
    head = [TOKENIZER.bos, at.user_start, *asked, at.user_end, at.assistant_start]
    read = len(head) + len(encode("It is"))
    for (found, _), text, start in ((got[0], "water", len(head)), (got[1], "It is water", read)):
        expected = log_p_of([*head, *encode(text)])[0][start - 1 :].sum()
        assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(LrkvError, match="without --apply_chat_template"):
        lm.loglikelihood([request("loglikelihood", prompt + "\n", "water")])
    with pytest.raises(LrkvError, match="there is one format"):
        lm.chat_template("other")


def test_a_chat_is_answered_until_it_ends_or_a_stop(tasks):
    text = "Water is cold in May."
    lm = harness_of(language_model(TOKENIZER, says(TOKENIZER, text), context=128, batch=2))
    prompt = lm.apply_chat_template([{"role": "user", "content": "What is ice?"}])
    asked = [
        request("generate_until", prompt, {"until": ["\n"], "max_gen_toks": 40}),
        request("generate_until", prompt, {"until": " in", "max_gen_toks": 40}),
        request("generate_until", prompt, {"max_gen_toks": 1}),
    ]
    first = TOKENIZER.decode(TOKENIZER.encode(text)[:1])
    assert lm.generate_until(asked) == [text, "Water is cold", first]


@pytest.mark.usefixtures("one_device")
def test_the_command_asks_a_run_and_reports_what_ours_scores(
    tiny, tasks, tmp_path, capsys, monkeypatch
):
    """With the harness's own options, a chat's template among them."""
    from lrkv_jax.evaluation.harness_adapter import LrkvLM, command_line
    from lrkv_jax.training.loop import train

    config = tiny("train.steps=2", "model.vocabulary=4224", CHATS)
    train(config)
    run = config.run_dir
    out = tmp_path / "out"
    rest = ["--tasks", "demo_arc_easy", "--include_path", str(tasks), "--limit", "6"]
    more = ["--output_path", str(out), "--log_samples", "--apply_chat_template"]
    command_line({"run": str(run), "batch": 3}, rest)
    table = capsys.readouterr().out
    lm = harness_of(LanguageModel(load_run(run), batch=2))
    ours = [
        one["acc_norm"] for one in ask(lm, tasks, ["demo_arc_easy"], 0, limit=6)["demo_arc_easy"]
    ]
    shown = re.escape(f"{np.mean(ours):.4f}".rstrip("0"))  # as the harness prints it
    assert "demo_arc_easy" in table and re.search(rf"acc_norm\|↑ +\| *{shown}\|", table)
    assert lrkv(capsys, monkeypatch, "harness", run, "--batch_size", 3, *rest, *more)[0] == 0
    (report,) = out.rglob("results_*.json")
    about = json.loads(report.read_text())
    assert about["config"]["batch"] == 3  # the harness's own option
    assert about["config"]["step"] == 2 and about["config"]["context"] == 32
    assert about["config"]["truncated_prompts"] == 0
    (samples,) = out.rglob("samples_*.jsonl")
    assert "<|user_start|>" in samples.read_text()
    for arguments, line in (
        ({"batch": 3}, "no run"),
        ({"run": run, "pretrained": "gpt2"}, "pretrained unknown"),
        ({"run": run, "batch": "auto"}, "batch_size auto"),
        ({"run": run, "step": 77}, "77"),
    ):
        with pytest.raises(LrkvError, match=line):
            LrkvLM.create_from_arg_obj(arguments)
    lm = LrkvLM.create_from_arg_string(f"run={run},batch=10,mesh.data=2,mesh.fsdp=4")
    # Each of eight devices has as many slots as the others.
    assert lm.model._engine.batch == 16 and lm.tokenizer_name.startswith("sotu-4096-")
