"""The commands that use a trained run: evaluate, generate, chat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lrkv_jax.cli.shared import Overrides, Run, app, batches_bar, step_named
from lrkv_jax.errors import LrkvError

if TYPE_CHECKING:
    from lrkv_jax.train.restore import TrainedRun

Tokens = Annotated[int, typer.Option(help="new tokens at most")]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
TopK = Annotated[int, typer.Option(help="0 keeps all")]
TopP = Annotated[float, typer.Option(help="1 keeps all")]
Step = Annotated[str | None, typer.Option(help="a saved step, or best")]


@app.command()
def evaluate(
    run: Run,
    overrides: Overrides = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="comma-separated: bpb, agreement, arc_easy, arc_challenge, mmlu, gsm8k, humaneval"
        ),
    ] = "bpb,agreement",
    batch: Annotated[int | None, typer.Option(help="sequences at a time")] = None,
    step: Step = None,
    style: Annotated[
        str | None, typer.Option(help="letters (a chat) or harness; letters if midtrained")
    ] = None,
    data: Annotated[str, typer.Option(help="where the sets lie, or demo")] = "data/tasks",
    shots: Annotated[int | None, typer.Option(help="in harness style; as published")] = None,
    limit: Annotated[int | None, typer.Option(help="first examples of each set")] = None,
    samples: Annotated[int, typer.Option(help="generated answers an example")] = 1,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    tokens: Tokens = 512,
    seed: Annotated[int, typer.Option()] = 0,
    run_model_code: Annotated[
        bool, typer.Option("--run-model-code", help="for humaneval, in a sandbox")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="programs run at a time")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, not a table")] = False,
) -> None:
    """Held-out loss of a run, its cached decode against the forward, and the five benchmarks."""
    from lrkv_jax.evals.benchmark import Settings
    from lrkv_jax.evals.evaluate import BENCHMARKS
    from lrkv_jax.evals.evaluate import evaluate as run_evaluation
    from lrkv_jax.evals.show import print_evaluation
    from lrkv_jax.runtime import start
    from lrkv_jax.train.run_dir import read_run

    start(alone="lrkv evaluate")
    names = [task for task in tasks.split(",") if task]
    config = read_run(run)
    chats = config.data.mixture is not None
    context = config.train.context
    if set(names) & {"gsm8k", "humaneval"} and tokens >= context:
        tokens = context // 2
        print(f"answers take up to {tokens} tokens: the run reads {context}", flush=True)
    settings = Settings(
        style=style or ("letters" if chats else "harness"), folder=data, shots=shots, limit=limit,
        samples=samples, temperature=temperature, top_p=top_p, new_tokens=tokens, seed=seed,
        run_model_code=run_model_code, workers=workers,
    )  # fmt: skip
    with batches_bar(not set(names) & BENCHMARKS.keys()) as progress:
        result = run_evaluation(
            run, tasks=names, batch=batch, step=step_named(step), settings=settings,
            overrides=overrides or [], progress=progress,
        )  # fmt: skip
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_evaluation(result, Console())


@app.command()
def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="text to go on from; may be repeated")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="JSON lines with a prompt, or a chat's messages, each")
    ] = None,
    out: Annotated[str | None, typer.Option(help="where JSON lines go, with --prompts")] = None,
    batch: Annotated[int, typer.Option(help="sequences at a time, with --prompts")] = 8,
    tokens: Tokens = 128,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option()] = 0,
    step: Step = None,
) -> None:
    """Continue prompts from the cache, one by one on the screen or a file of them."""
    from lrkv_jax.data.tokenizer import load_tokenizer
    from lrkv_jax.decode import Sampling
    from lrkv_jax.decode import generate as run_decode

    _check_tokens(tokens)
    if bool(prompt) == bool(prompts):
        raise LrkvError("give either --prompt TEXT or --prompts FILE")
    if bool(prompts) != bool(out):
        raise LrkvError("--prompts FILE and --out FILE go together")
    sampling = Sampling(temperature, top_k, top_p)
    trained = _loaded("generate", run, step, overrides)
    if prompts:
        from lrkv_jax.generation import generate_file

        with batches_bar() as progress:
            cut = generate_file(
                trained, prompts, out, new_tokens=tokens, sampling=sampling, seed=seed, batch=batch,
                progress=progress,
            )  # fmt: skip
        lost = f", {cut} prompts lost their beginning" if cut else ""
        print(f"{out}{lost}")
        return
    tokenizer = load_tokenizer(trained.config.data.tokenizer)
    ids = [[tokenizer.bos, *tokenizer.encode(text).tolist()] for text in prompt]
    continued = run_decode(
        trained.config.model, trained.params, ids, tokens,
        sampling=sampling, seed=seed, stop=(tokenizer.bos,), mesh=trained.mesh,
    )  # fmt: skip
    for text, more in zip(prompt, continued, strict=True):
        print(text + tokenizer.decode(more))


@app.command()
def chat(
    run: Run,
    overrides: Overrides = None,
    tokens: Annotated[int, typer.Option(help="new tokens an answer at most")] = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option()] = 0,
    step: Step = None,
) -> None:
    """Talk with a midtrained run: /reset, /save FILE, /set temperature=0.5, /help, /quit."""
    from lrkv_jax.chat import Chat
    from lrkv_jax.cli.conversation import converse
    from lrkv_jax.decode import Sampling

    _check_tokens(tokens)
    sampling = Sampling(temperature, top_k, top_p)
    trained = _loaded("chat", run, step, overrides)
    talk = Chat(trained, sampling=sampling, seed=seed, new_tokens=tokens)
    converse(talk, Console(highlight=False))


def _check_tokens(tokens: int) -> None:
    if tokens < 1:
        raise LrkvError(f"--tokens {tokens}: use 1 or more")


def _loaded(command: str, run: str, step: str | None, overrides: list[str] | None) -> TrainedRun:
    """The run that a command decodes with, once this process has its devices."""
    from lrkv_jax.runtime import start
    from lrkv_jax.train.restore import load_run

    start(alone=f"lrkv {command}")
    return load_run(run, step=step_named(step), overrides=overrides or [])
