"""Promises of the files that ship with the package."""

import gzip
import hashlib
import shutil

import pytest

from lrkv_jax.data.assets import FOLDER, read_asset
from lrkv_jax.errors import LrkvError

ASSETS = ("gpt2.bpe.gz", "sotu-4096.json", "sotu.jsonl.xz", "stdlib.jsonl.xz")
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


@pytest.fixture
def folder(tmp_path):
    for name in (*ASSETS, "SHA256SUMS"):
        shutil.copy(FOLDER / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", ASSETS)
def test_each_asset_is_whole_and_a_corrupt_one_is_named(folder, name):
    assert read_asset(name)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(LrkvError, match=f"{name} is damaged.*reinstall"):
        read_asset(name, folder)


def test_a_missing_asset_an_unlisted_one_and_a_missing_list_are_named(folder):
    (folder / "gpt2.bpe.gz").unlink()
    with pytest.raises(LrkvError, match="gpt2.bpe.gz is missing.*reinstall"):
        read_asset("gpt2.bpe.gz", folder)
    with pytest.raises(LrkvError, match="other.bin is not listed"):
        read_asset("other.bin", folder)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(LrkvError, match="SHA256SUMS is missing"):
        read_asset("gpt2.bpe.gz", folder)


def test_merges_are_gpt2s():
    merges = gzip.decompress(read_asset("gpt2.bpe.gz"))
    assert hashlib.sha256(merges).hexdigest() == GPT2_SHA256
    assert "Modified MIT License" in (FOLDER / "gpt2.LICENSE").read_text()
