"""The command that serves a run over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lrkv_jax.cli import shared
from lrkv_jax.cli.shared import Overrides, Run, Step, app, working
from lrkv_jax.errors import LrkvError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@app.command()
def serve(
    run: Run,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Holds the key that clients send (or: LRKV_SERVE_KEY=KEY)."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name (default: the run directory's).")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are decoded together.")] = 8,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens of a text with its prompt (default: the run's)."),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of the cache, as in 512M (default: BATCH whole contexts)."
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Texts that may wait; more get 429.")] = 256,
    drafts: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens looked up in a text and read at once where it repeats itself, to 7."
        ),
    ] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of a reply, at most.")] = 600.0,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds for accepted replies after SIGTERM.")
    ] = 120.0,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Further names by which requests may mean this server, or * (default: any "
            "beyond this machine, where clients have a key).",
        ),
    ] = None,
    allowed_origins: Annotated[
        str | None,
        typer.Option(
            metavar="ORIGINS",
            help="Sites whose pages may send requests, as in https://a.org,https://b.org, or *.",
        ),
    ] = None,
    connections: Annotated[int, typer.Option(min=8, help="Open connections, at most.")] = 2048,
    connections_each: Annotated[
        int, typer.Option(min=4, help="Open connections of one address, at most.")
    ] = 512,
    step: Step = None,
) -> None:
    """Serve a run to OpenAI's clients, and to people.

    The page is at http://HOST:PORT/.
    """
    memory = None if cache is None else _bytes("--cache", cache)
    try:
        from lrkv_jax.serving import guards
        from lrkv_jax.serving.connections import ConnectionLimits
        from lrkv_jax.serving.server import bound, key_of
        from lrkv_jax.serving.server import serve as serve_until_signalled
    except ModuleNotFoundError as error:
        raise LrkvError(f'{error.name} is missing: pip install "lrkv-jax[serve]"') from None
    from lrkv_jax.training.run_dir import read_run

    key = key_of(key_file)
    config = read_run(run, overrides or [])
    there = bound(host, port, key)  # before a model is read for nothing
    hosts = guards.allowed_hosts(there.getsockname()[0], host, allowed_hosts)
    origins = guards.listed("--allowed-origins", allowed_origins)
    shared.start_alone("serve")
    from lrkv_jax.serving.service import Service

    with working("reading the run"):
        from lrkv_jax.training.restore import load_run

        trained = load_run(run, step=shared.step_named(step), overrides=overrides or [])
    if trained.config.model.decode_cache == "int8":
        with working("measuring the int8 cache"):
            from lrkv_jax.data.docstrings import docstring_rows
            from lrkv_jax.evaluation.agreement import agreement_on

            rows_RU = docstring_rows(trained.tokenizer, trained.config.train.context)
            found = agreement_on(trained, rows_RU[:, :-1])
        print(
            f"int8 cache, {found.positions} tokens of docstrings: {found.loss:.4f} nats a token "
            f"(the forward: {found.forward_loss:.4f}), {found.same_greedy_token:.1%} the same "
            "greedy token"
        )
    length = config.train.context if context is None else context
    with working("compiling"):
        service = Service.of(
            trained, name or Path(run).resolve().name,
            batch=batch, context=length, cache_bytes=memory, queue=queue, seconds=timeout,
            drafts=drafts,
        )  # fmt: skip
    address, taken = there.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    report = service.runner.engine.report()
    print(
        f"{service.name}: step {trained.step}, {batch} texts of up to {length} tokens, "
        f"cache {report.cache_bytes / (1 << 20):.0f} MiB"
    )

    def ready(leave: object) -> None:
        print(f"ready at http://{shown}:{taken}/ (Ctrl-C ends)", flush=True)

    serve_until_signalled(
        service, there, key, drain=drain, ready=ready, hosts=hosts, origins=origins,
        limits=ConnectionLimits(connections, connections_each),
    )  # fmt: skip
    print("ended: every accepted request was answered", file=sys.stderr)
    calls = service.runner.engine.calls
    if calls.drafted:
        share = calls.accepted / calls.drafted
        print(f"of {calls.drafted:,} tokens that were looked up {share:.0%} were right")


def _bytes(option: str, text: str) -> int:
    number, unit = text.rstrip("kmgtKMGTiB"), text[len(text.rstrip("kmgtKMGTiB")) :].lower()
    unit = unit.removesuffix("b").removesuffix("i")
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise LrkvError(f"{option} {text}: use a size, as in 512M or 2G") from None
    if size < 1:
        raise LrkvError(f"{option} {text}: use more than nothing")
    return size
