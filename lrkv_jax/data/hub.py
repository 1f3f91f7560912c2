"""Files of a repository on the Hugging Face hub, fetched into a folder, at one commit, resumably.

The extra `hub`. What is fetched at the first time is written beside the files as PROVENANCE.json
before the first of them, so that later calls take the same commit and know what is missing.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.provenance import FILE, read_provenance
from lrkv_jax.data.sources import EMBEDDED
from lrkv_jax.errors import LrkvError

_PLACES = {"dataset": "datasets/", "model": ""}
_AGAIN = "what is complete stays, and the same command goes on from it"


def download(
    repo: str,
    revision: str,
    patterns: Sequence[str],
    folder: str | Path,
    repo_type: str = "dataset",
    *,
    first: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fetch a repository's files that match one of the patterns into `folder`, under their paths.

    patterns: names, or fnmatch patterns whose * also matches "/". first: that many of the files by
    name, all unless given. revision: a branch, tag or commit; resolved at the first call and
    pinned. repo_type: dataset or model. tell: hears of each file that is fetched.

    Returns what `read_provenance` reads. A complete folder needs no network. A file takes its name
    when all of it is there; an interrupted one is resumed by the next call.

    Raises LrkvError, with what to do, where the client is not installed, the hub is out of reach or
    refuses, nothing matches, the folder holds something else, or the disk is full.
    """
    folder = Path(folder)
    asked = {"repo": repo, "repo_type": repo_type, "revision": revision}
    asked |= {"patterns": list(patterns), "first": first}
    known = read_provenance(folder)
    if known is not None:
        _check_same(folder, known, asked)
        if all(known[key] == asked[key] for key in asked) and not missing(folder, known):
            return known
    commit = revision if known is None else known["commit"]
    listed = _talk(repo, repo_type, lambda hub: _list(hub, repo, commit, repo_type))
    found = _chosen(listed["files"], patterns, first, f"{repo} at {listed['commit'][:12]}")
    extra = sorted(set(known["files"]) - set(found)) if known else []
    if extra:
        raise LrkvError(
            f"{folder} holds {len(extra)} files more than are asked for, as {extra[0]}: delete "
            f"the folder, or fetch into another"
        )
    provenance = asked | {"commit": listed["commit"], "licence": listed["licence"], "files": found}
    _write(folder, provenance)
    wanted = missing(folder, provenance)
    for number, name in enumerate(wanted, 1):
        tell(f"fetching {name} ({number} of {len(wanted)}, {found[name] / 1e6:,.1f} MB)")
        _talk(repo, repo_type, lambda hub, name=name: _fetch(hub, provenance, name, folder))
        if missing(folder, {"files": {name: found[name]}}):
            (folder / name).unlink(missing_ok=True)
            raise LrkvError(f"{name} of {repo} came with another size than the hub says: {_AGAIN}")
    return provenance


def fetch_source(config: DataConfig, tell: Callable[[str], None]) -> None:
    """Fetch what `data.hub` names into `data.source`; nothing where it names nothing.

    A folder with files that no download put there is left as it is, and that is told.
    Raises LrkvError as `download` does, and where the source is the embedded corpus.
    """
    hub = config.hub
    if hub is None:
        return
    if config.source == EMBEDDED:
        raise LrkvError("data.hub needs a folder to fetch into: set data.source to its path")
    folder = Path(config.source)
    begun = (folder / ".cache").is_dir()  # where the client keeps what it has not finished
    yours = folder.is_dir() and any(folder.iterdir()) and not begun
    if yours and read_provenance(folder) is None:
        tell(f"{folder} holds files that were not fetched here: they are taken as they are")
        return
    download(hub.repo, hub.revision, hub.files, folder, first=hub.first, tell=tell)


def missing(folder: Path, provenance: dict[str, Any]) -> list[str]:
    """The files that the folder lacks, or has in another size."""
    return [
        name
        for name, size in provenance["files"].items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]


def _check_same(folder: Path, known: dict[str, Any], asked: dict[str, Any]) -> None:
    for key in ("repo", "repo_type", "revision"):
        if known[key] != asked[key] and known["commit"] != asked[key]:
            raise LrkvError(
                f"{folder} holds {known['repo']} at {known['revision']}, not {key} {asked[key]}: "
                "fetch into another folder"
            )


def _chosen(
    sizes: dict[str, int], patterns: Sequence[str], first: int | None, what: str
) -> dict[str, int]:
    found = sorted(n for n in sizes if any(fnmatch.fnmatchcase(n, p) for p in patterns))
    if not found:
        there = sorted({f"{Path(name).parent}/*{Path(name).suffix}" for name in sizes})[:5]
        raise LrkvError(
            f"{what} has no file like {' or '.join(patterns)}: it has such as {', '.join(there)}"
        )
    return {name: sizes[name] for name in found[:first]}


def _write(folder: Path, provenance: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{FILE}.{os.getpid()}"
        fresh.write_text(json.dumps(provenance, indent=2) + "\n")
        fresh.replace(folder / FILE)
    except OSError as error:
        raise LrkvError(f"{folder} cannot be written ({error.strerror or error})") from None


def _list(hub: Any, repo: str, revision: str, repo_type: str) -> dict[str, Any]:
    api = hub.HfApi(endpoint=_endpoint())
    info = api.repo_info(repo, revision=revision, repo_type=repo_type, files_metadata=True)
    card = info.card_data or {}
    files = {file.rfilename: file.size for file in info.siblings or ()}
    return {"commit": info.sha, "licence": card.get("license"), "files": files}


def _fetch(hub: Any, provenance: dict[str, Any], name: str, folder: Path) -> None:
    hub.hf_hub_download(
        provenance["repo"],
        name,
        repo_type=provenance["repo_type"],
        revision=provenance["commit"],
        local_dir=folder,
        endpoint=_endpoint(),
    )


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _talk(repo: str, repo_type: str, do: Callable[[Any], Any]) -> Any:
    """What `do` returns of the client; its errors as one line that says what to do."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise LrkvError(
            "fetching from the hub needs huggingface_hub: pip install 'lrkv-jax[hub]'"
        ) from None
    page = f"https://huggingface.co/{_PLACES[repo_type]}{repo}"
    try:
        return do(hub)
    except errors.GatedRepoError:
        raise LrkvError(
            f"{repo} is gated: accept its terms at {page}, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise LrkvError(f"{repo} has no such revision: see {page}/tree/main") from None
    except errors.RepositoryNotFoundError:
        raise LrkvError(
            f"{repo} is not there, or not for you: see {page}; if it is private, `hf auth login`"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise LrkvError("HF_HUB_OFFLINE forbids to fetch: unset it, or set data.hub=null") from None
    except errors.RemoteEntryNotFoundError as error:
        raise LrkvError(f"a file of {repo} is gone ({_reason(error)}): see {page}") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise LrkvError(
                f"{repo} is refused ({status}): accept its terms at {page}, then `hf auth login`"
            ) from None
        raise LrkvError(f"the hub fails ({_reason(error)}): {_AGAIN}") from None
    # The network's errors are httpx's and xet's, the disk's the system's.
    except Exception as error:
        reason = _reason(_cause(error))
        raise LrkvError(f"fetching {repo} was cut off ({reason}): {_AGAIN}") from error


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    said = (str(error).splitlines() or [""])[0][:120]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
