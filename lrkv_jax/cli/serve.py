"""The command that serves a run over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lrkv_jax.cli import shared
from lrkv_jax.cli.shared import Overrides, Run, Step, app, at_least, working
from lrkv_jax.errors import LrkvError


@app.command()
def serve(
    run: Run,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Holds clients' key (or set LRKV_SERVE_KEY=KEY)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name (default: the run directory's).")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are decoded together.")] = 8,
    context: Annotated[
        int | None,
        typer.Option(
            parser=at_least(3),  # as long as what compiles its programs
            metavar="N",
            help="Most tokens of a text with its prompt (default: the run's).",
        ),  # fmt: skip
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of the cache, as in 2GiB (default: BATCH whole contexts)."
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Texts that may wait; more get 429.")] = 256,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds for accepted requests after SIGTERM.")
    ] = 120.0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A further name by which requests may mean this server, or *; may be repeated "
            "(default: any beyond this machine, where clients have a key).",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="A site whose pages may send requests, or *; may be repeated."
        ),
    ] = None,
    step: Step = None,
) -> None:
    """Serve a run through OpenAI's HTTP interface and a web page.

    The page is at http://HOST:PORT/.
    """
    try:
        from lrkv_jax.serving import server
    except ModuleNotFoundError as error:
        raise LrkvError(f'{error.name} is missing: pip install "lrkv-jax[serve]"') from None
    from lrkv_jax.training.run_dir import read_run

    cache_bytes = None if cache is None else server.bytes_of("--cache", cache)
    key = server.key_of(key_file)
    config = read_run(run, overrides or [])
    listener = server.bound(host, port, key)  # before a model is read for nothing
    hosts = server.allowed_hosts(listener.getsockname()[0], host, allowed_host or ())
    shared.start_alone("serve")
    trained = shared.loaded(run, step, overrides)
    from lrkv_jax.serving.service import Service

    length = config.train.seq_len if context is None else context
    with working("compiling, a minute at most the first time"):
        service = Service(
            trained, name or Path(run).resolve().name,
            batch=batch, context=length, cache_bytes=cache_bytes, queue=queue,
        )  # fmt: skip
    size = service.engine_loop.engine.report().cache_bytes / (1 << 20)
    print(
        f"{service.name}: step {trained.step}, {batch} texts of up to {length} tokens, "
        f"cache {size:.0f} MiB"
    )

    def ready(leave: object) -> None:
        print(f"ready at {server.url_of(listener)} (Ctrl-C ends)", flush=True)

    cut = server.serve(
        service, listener, key, drain=drain, ready=ready, hosts=hosts, origins=allowed_origin or ()
    )
    how = f"{cut} requests were cut short" if cut else "every accepted request was answered"
    print(f"ended: {how}", file=sys.stderr)
