"""Files that ship with the package.

Each was made once, by scripts that git's history has (`build.py` and `demo_build.py` of
this folder): `*.PROVENANCE.md` and `demo/DEMO.md` record how, and from what.
"""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def read_asset(name: str) -> bytes:
    """Return an asset's bytes as stored: compressed files stay compressed."""
    return (FOLDER / name).read_bytes()


def asset_checksum(name: str) -> str:
    """Return the sha256 (hex) of an asset's bytes."""
    return hashlib.sha256(read_asset(name)).hexdigest()
