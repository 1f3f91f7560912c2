"""`lrkv quickstart --chat`: pretrain, midtrain, evaluate and talk, on what ships."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lrkv_jax.config import load_config
from lrkv_jax.distributed.stopping import Stopping
from lrkv_jax.evaluation import evaluate
from lrkv_jax.evaluation.benchmark import BenchmarkSettings
from lrkv_jax.evaluation.evaluate import BENCHMARKS
from lrkv_jax.evaluation.show import print_evaluation
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.chat import Chat
from lrkv_jax.training.loop import train
from lrkv_jax.training.restore import load_run

PRETRAIN = "configs/quickstart.yaml"
MIDTRAIN = "configs/quickstart_midtrain.yaml"
NEW_TOKENS = 64
TURNS = ("What is 27 * 14?", "Who lives in the White House?", "How many states are there?")


def run_chat(
    overrides: Sequence[str],
    console: Console,
    *,
    run_model_code: bool = False,
    stopping: Stopping | None = None,
) -> bool:
    """Pretrain the quickstart's model, midtrain it on the demonstration sets, ask it the five
    benchmarks in their demonstration form, and talk to it; False if a signal stopped a run.

    overrides: of the pretraining run, `attention=NAME` for another variant. Runs that are finished
    are used as they are. Without `run_model_code` no program that the model writes is run.
    """
    began = time.monotonic()
    pretrained = train(load_config(PRETRAIN, overrides), console=console, stopping=stopping)
    if not pretrained.finished:
        return False
    start = [f"init_from={pretrained.run_dir}"]
    if any(override.startswith("run_dir=") for override in overrides):
        start.append(f"run_dir={pretrained.run_dir}-midtrained")
    midtrained = train(load_config(MIDTRAIN, start), console=console, stopping=stopping)
    if not midtrained.finished:
        return False
    tasks = [name for name in BENCHMARKS if name != "humaneval" or run_model_code]
    settings = BenchmarkSettings(
        folder="demo", new_tokens=NEW_TOKENS, run_model_code=run_model_code
    )
    result = evaluate(midtrained.run_dir, tasks=["bpb", "agreement", *tasks], settings=settings)
    print_evaluation(result, console)
    if not run_model_code:
        console.print("humaneval was not asked: --run-model-code lets it run what the model wrote")
    _talk(Chat(load_run(midtrained.run_dir), sampling=Sampling(), new_tokens=NEW_TOKENS), console)
    console.print(
        f"{time.monotonic() - began:.0f} s. A model this small, of 400,000 tokens, knows the form "
        "of an answer and no more.\nWhat to try next:\n"
        f"  lrkv chat {midtrained.run_dir}\n"
        "  lrkv data build configs/128m.yaml                       FineWeb-Edu, the real path:\n"
        "  lrkv train configs/128m.yaml attention=lrkv mesh.fsdp=8\n"
        "  lrkv data fetch && lrkv train configs/midtrain.yaml init_from=runs/128m-lrkv\n"
        "  lrkv evaluate runs/128m-midtrain-lrkv --tasks arc_easy,arc_challenge,mmlu,gsm8k",
        highlight=False,
        soft_wrap=True,
    )
    return True


def _talk(chat: Chat, console: Console) -> None:
    """Each turn, and what of the conversation was in the cache already."""
    for turn in TURNS:
        cached = chat.used
        console.print(Text("asked by this command: ", style="bold") + Text(turn))
        console.print(Text("".join(piece.text for piece in chat.say(turn))))
        console.print(
            f"({cached} tokens were in the cache, {chat.used - cached} came with this turn)",
            style="dim", highlight=False,
        )  # fmt: skip
