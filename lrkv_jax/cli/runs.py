"""The commands that use a trained run: evaluate, harness, generate, chat, checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from tabulate import tabulate

from lrkv_jax import files
from lrkv_jax.cli import shared
from lrkv_jax.cli.shared import Json, Overrides, Run, Seed, Step, app, count, step_named, working
from lrkv_jax.errors import EXIT_BAD_INPUT, LrkvError

if TYPE_CHECKING:
    from lrkv_jax.inference.chat import Chat

COMPILING = "compiling, a minute at most the first time"
Tokens = Annotated[int, typer.Option(parser=count, metavar="N", help="Most new tokens")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy")]
TopK = Annotated[int, typer.Option(help="Sample among the K likeliest tokens; 0 keeps all")]
TopP = Annotated[
    float, typer.Option(help="Sample among the likeliest tokens that make up this probability")
]


@app.command()
def evaluate(
    run: Run,
    overrides: Overrides = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Any of bpb, docstrings, agreement, arc_easy, arc_challenge, mmlu, gsm8k and "
            "humaneval, separated by commas"
        ),
    ] = "bpb,agreement",
    batch: Annotated[
        int | None, typer.Option(help="Sequences at a time (default: the run's own batch).")
    ] = None,
    step: Step = None,
    data: Annotated[
        str, typer.Option(help="Folder of the sets; demo for the shipped demonstration sets")
    ] = "data/tasks",
    limit: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="N",
            help="Ask only the first examples of each set (default: all).",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers generated per example")] = 1,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    tokens: Tokens = 512,
    seed: Seed = 0,
    run_model_code: Annotated[
        bool,
        typer.Option(
            "--run-model-code",
            help="Run programs that the model wrote, in a sandbox, for humaneval.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Evaluate a run.

    Its held-out loss, its cached decode against the forward, and benchmarks.
    """
    shared.start_alone("evaluate")
    with working("reading and evaluating the run") as progress:
        from lrkv_jax.evaluation.benchmark import BenchmarkSettings
        from lrkv_jax.evaluation.evaluate import evaluate as run_evaluation
        from lrkv_jax.evaluation.show import print_evaluation

        settings = BenchmarkSettings(
            folder=data, limit=limit, samples=samples, temperature=temperature, top_p=top_p,
            max_new_tokens=tokens, seed=seed, run_model_code=run_model_code,
        )  # fmt: skip
        result = run_evaluation(
            run, tasks=shared.names(tasks), batch=batch, step=step,
            settings=settings, overrides=overrides or [], progress=progress,
        )  # fmt: skip
    if as_json:
        print(files.json_of(result))
    else:
        print_evaluation(result, Console(markup=False))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def harness(
    context: typer.Context,
    run: Run,
    batch: Annotated[int, typer.Option(help="Sequences at a time")] = 8,
    step: Step = None,
    seed: Seed = 0,
) -> None:
    """Evaluate a run on tasks of the lm-evaluation-harness.

    Every other option is the harness's own (lm_eval run --help), as in: lrkv harness
    RUN --tasks hellaswag,piqa --num_fewshot 5 --limit 100
    """
    shared.start_alone("harness")
    from lrkv_jax.evaluation.harness_adapter import command_line

    chosen = {} if step is None else {"step": step}
    # Before the harness's own options, so that its --batch_size counts where it is given.
    options = ["--batch_size", str(batch), *context.args]
    command_line({"run": run, "seed": seed, **chosen}, options)


@app.command()
def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be repeated.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON lines, each with a prompt or a chat's messages."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --prompts: where to write JSON lines.")
    ] = None,
    batch: Annotated[int, typer.Option(help="With --prompts: sequences at a time")] = 8,
    tokens: Tokens = 128,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    step: Step = None,
) -> None:
    """Continue prompts, given on the command line or in a file."""
    if bool(prompt) == bool(prompts):
        raise LrkvError("give either --prompt TEXT or --prompts FILE")
    if bool(prompts) != bool(out):
        raise LrkvError("--prompts FILE and --out FILE go together")
    shared.start_alone("generate")
    from lrkv_jax.inference import Sampling
    from lrkv_jax.inference.generation import generate_file, streamed

    sampling = Sampling(temperature, top_k, top_p)
    trained = shared.loaded(run, step, overrides)
    if prompts:
        with working(COMPILING) as progress:
            cut = generate_file(
                trained, prompts, out, max_new_tokens=tokens, sampling=sampling, seed=seed,
                batch=batch, progress=progress,
            )  # fmt: skip
        lost = f", {cut} prompts lost their beginning" if cut else ""
        print(f"{out}{lost}")
        return
    pieces = streamed(trained, prompt, max_new_tokens=tokens, sampling=sampling, seed=seed)
    with working(COMPILING):
        first = list(itertools.islice(pieces, 2))  # the prompt, and what compiling it gave
    for piece in itertools.chain(first, pieces):
        print(piece, end="", flush=True)


@app.command()
def chat(
    run: Run,
    overrides: Overrides = None,
    tokens: Tokens = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    step: Step = None,
) -> None:
    """Talk with a midtrained run.

    In the chat: /reset and /quit.
    """
    shared.start_alone("chat")
    with working("starting, for some seconds"):
        from lrkv_jax.data.chat import ChatFormat
        from lrkv_jax.data.tokenizer import load_tokenizer
        from lrkv_jax.inference import Sampling
        from lrkv_jax.inference.chat import Chat
        from lrkv_jax.training.run_dir import read_run

    config = read_run(run)
    if not ChatFormat(load_tokenizer(config.data.tokenizer)).trained(config.data):
        name = "quickstart_midtrain" if config.name == "quickstart" else "midtrain"
        raise LrkvError(
            f"{run} has not been midtrained: run lrkv train configs/{name}.yaml init_from={run}"
        )
    sampling = Sampling(temperature, top_k, top_p)
    trained = shared.loaded(run, step, overrides)
    talk = Chat(trained, sampling=sampling, seed=seed, max_new_tokens=tokens)
    converse(talk, Console(highlight=False, markup=False))


def converse(chat: Chat, console: Console) -> None:
    """Talk until the user leaves. Mistakes are reported, and the chat continues."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() then knows the arrow keys
    config = chat.run.config
    console.print(
        f"{config.directory}, step {chat.run.step}: {config.model.attention.kind}, context of "
        f"{chat.context} tokens. /reset starts a new conversation, /quit ends; Ctrl-C stops an "
        "answer."
    )
    while True:
        try:
            line = console.input(Text("you> ", style="bold"))
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            chat.reset()
            console.print("a new conversation", style="dim")
        elif line.strip():
            _answer(chat, line, console)


def _answer(chat: Chat, text: str, console: Console) -> None:
    pieces = chat.say(text)
    try:
        with working(COMPILING):
            first = list(itertools.islice(pieces, 1))
        for piece in itertools.chain(first, pieces):
            console.print(Text(piece), end="", soft_wrap=True)
    except KeyboardInterrupt:
        pieces.close()
        console.print(" …", end="")
    except LrkvError as error:
        console.print(str(error), style="red", end="")
    console.print()


checkpoint_app = shared.group("checkpoint", "List and verify a run's checkpoints.")


@checkpoint_app.command("list")
def checkpoint_list(run: Run, as_json: Json = False) -> None:
    """List every saved step with its tokens, loss and size.

    Only manifests are read.
    """
    from lrkv_jax.training.checkpointing.inspect import entries

    _print_checkpoints(entries(run), as_json)


@checkpoint_app.command("verify")
def checkpoint_verify(
    run: Run,
    step: Annotated[
        Any,
        typer.Option(parser=step_named, metavar="N|best", help="Which checkpoint (default: all)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every file and compare it with what was saved.

    Exits with 2 if anything is damaged.
    """
    from lrkv_jax.training.checkpointing.inspect import entries, verify

    there = entries(run)
    if step is not None:
        there = [e for e in there if (e.best if step == "best" else e.step == step)]
        if not there:
            raise LrkvError(f"no checkpoint of step {step} in {run}: see lrkv checkpoint list")
    checked = [found for entry in there if (found := verify(entry))]
    _print_checkpoints(checked, as_json, checked=True)
    if not checked or any(entry.damage for entry in checked):
        sys.exit(EXIT_BAD_INPUT)


def _print_checkpoints(entries, as_json: bool, *, checked: bool = False) -> None:
    rows = []
    for entry in entries:
        manifest = entry.manifest or {}
        known = {name: manifest.get(name) for name in ("tokens", "validation_loss", "saved")}
        more = {"bytes": entry.bytes, "best": entry.best, "damage": entry.damage}
        rows.append({"step": entry.step, **known, **more})
    if as_json:
        print(files.json_of(rows))
        return
    table = []
    for row in rows:
        sound = f"DAMAGED: {row['damage']}" if row["damage"] else "sound" * checked
        saved = row["saved"] and time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved"]))
        state = ", ".join(filter(None, (sound, "best" * row["best"])))
        megabytes = row["bytes"] / 1e6
        table.append((row["step"], row["tokens"], row["validation_loss"], megabytes, saved, state))
    headers = ("step", "tokens", "held-out CE", "MB", "saved", "")
    formats = ("", "", ".4f", ".1f")
    print(tabulate(table, headers, floatfmt=formats, intfmt=",") if rows else "no checkpoints")
