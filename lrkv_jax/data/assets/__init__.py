"""Files that ship with the package, checked against `SHA256SUMS` each time they are read.

Each was made once, by scripts that git's history has (`build.py` and `demo_build.py` of this
folder): `*.PROVENANCE.md` and `demo/DEMO.md` say how and of what. `SHA256SUMS` is `sha256sum`'s.
"""

import hashlib
from pathlib import Path

from lrkv_jax.errors import LrkvError

FOLDER = Path(__file__).parent
_MEND = "reinstall lrkv-jax"


def asset_checksum(name: str, folder: Path = FOLDER) -> str:
    """Return the sha256 (hex) that `SHA256SUMS` lists for an asset, without reading the asset.

    Raises LrkvError where the list is missing or does not name it.
    """
    try:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
    except OSError:
        raise LrkvError(f"{folder / 'SHA256SUMS'} is missing: {_MEND}") from None
    sums = {file: digest for digest, file in (line.split() for line in lines)}
    if name not in sums:
        raise LrkvError(f"{name} is not listed in {folder / 'SHA256SUMS'}: {_MEND}")
    return sums[name]


def read_asset(name: str, folder: Path = FOLDER) -> bytes:
    """Return an asset's bytes as stored (compressed files stay compressed).

    Raises LrkvError where the file is missing or its sha256 is not the listed one.
    """
    path = folder / name
    expected = asset_checksum(name, folder)
    try:
        content = path.read_bytes()
    except OSError:
        raise LrkvError(f"{path} is missing: {_MEND}") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise LrkvError(f"{path} is damaged (its sha256 is not the listed one): {_MEND}")
    return content
