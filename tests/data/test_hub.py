"""Promises of fetching: pinned, continued, offline once it is there; errors that help."""

import errno
import hashlib
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.hub import download, fetch_source, read_provenance
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.records.folders import open_dataset
from lrkv_jax.errors import EXIT_BAD_INPUT, EXIT_UNAVAILABLE, LrkvError

REPO = "HuggingFaceFW/fineweb-edu"
WANTED = ("sample/10BT/*.jsonl",)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ABOUT = {"id": REPO, "sha": COMMIT, "cardData": {"license": "odc-by"}}


class Hub(ThreadingHTTPServer):
    """Speaks what huggingface_hub asks of the hub to fetch files: `files`, by name.

    asked: the path of each request. status: refuses all with it, and `code` as error.
    """

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked = files, []
        self.status, self.code = None, ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        hub, (path, *_) = self.server, self.path.split("?")
        hub.asked.append(path)
        if hub.status:
            self.send(hub.status, b"{}", {"X-Error-Code": hub.code})
        elif path in (f"/api/datasets/{REPO}/revision/{name}" for name in ("main", COMMIT)):
            siblings = [{"rfilename": n, "size": len(c)} for n, c in hub.files.items()]
            self.send(200, json.dumps(ABOUT | {"siblings": siblings}).encode())
        elif path.startswith(f"/api/datasets/{REPO}/tree/{COMMIT}"):
            self.send(200, json.dumps([in_tree(*file) for file in hub.files.items()]).encode())
        else:
            content = hub.files[path.removeprefix(f"/datasets/{REPO}/resolve/{COMMIT}/")]
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self.send(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def send(self, status, content, headers=()):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def in_tree(name, content):
    oid = hashlib.sha256(content).hexdigest()
    lfs = {"size": len(content), "oid": oid, "pointerSize": 134}
    return {"type": "file", "path": name, "size": len(content), "oid": "0" * 40, "lfs": lfs}


@pytest.fixture
def hub(monkeypatch):
    rows = "".join(f'{{"text": "row {n} of some text"}}\n' for n in range(9000)).encode()
    halves = (rows[:150_000], rows[150_000:])
    halves = [half[half.find(b"{") : half.rfind(b"\n") + 1] for half in (*halves, rows[:9000])]
    files = {f"sample/10BT/{n:03}_00000.jsonl": half for n, half in enumerate(halves)}
    with Hub(files | {"README.md": b"# FineWeb-Edu"}) as hub:
        threading.Thread(target=hub.serve_forever, args=(0.02,)).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between tries
        yield hub
        hub.shutdown()


def test_what_matches_is_fetched_once_and_pinned_and_needs_no_hub_then(hub, tmp_path, monkeypatch):
    provenance = download(REPO, "main", WANTED, tmp_path / "f")
    for name in provenance["files"]:
        assert (tmp_path / "f" / name).read_bytes() == hub.files[name]
    assert len(provenance["files"]) == 3 and not (tmp_path / "f" / "README.md").exists()
    assert (provenance["commit"], provenance["license"]) == (COMMIT, "odc-by")
    assert read_provenance(tmp_path / "f") == provenance
    asked = len(hub.asked)
    assert download(REPO, "main", WANTED, tmp_path / "f") == provenance
    assert len(hub.asked) == asked
    # A branch that moved on is not followed.
    (tmp_path / "f" / "sample/10BT/001_00000.jsonl").unlink()
    with pytest.raises(LrkvError, match="lacks 1 of 3 files of its download"):
        build_dataset(DataConfig(source=str(tmp_path / "f"), directory=str(tmp_path / "b")), 16)
    download(REPO, "main", WANTED, tmp_path / "f")
    paths = hub.asked[asked:]
    assert not any("main" in path for path in paths) and any(COMMIT in path for path in paths)
    # Offline a complete folder is taken, and an incomplete one refused.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert download(REPO, "main", WANTED, tmp_path / "f") == provenance
    shutil.rmtree(tmp_path / "f" / ".cache")  # as in a folder that was copied without it
    assert download(REPO, "main", WANTED, tmp_path / "f") == provenance
    (tmp_path / "f" / "sample/10BT/001_00000.jsonl").unlink()
    for folder in ("f", "other"):
        with pytest.raises(LrkvError, match="fetching .* failed"):
            download(REPO, "main", WANTED, tmp_path / folder)


def test_the_first_files_can_be_chosen_and_more_later(hub, tmp_path):
    few = download(REPO, "main", WANTED, tmp_path, first=1)
    assert list(few["files"]) == ["sample/10BT/000_00000.jsonl"]
    assert len(download(REPO, "main", WANTED, tmp_path, first=2)["files"]) == 2
    for repo, revision, first in ((REPO, "other", 2), ("other/one", "main", 2), (REPO, "main", 1)):
        with pytest.raises(LrkvError, match=f"holds 2 files of {REPO} at main, which are not"):
            download(repo, revision, WANTED, tmp_path, first=first)


def test_a_configuration_fetches_and_its_build_knows_the_origin(hub, tmp_path):
    source = tmp_path / "source"
    hub_settings = {"repo": REPO, "files": WANTED}
    config = DataConfig(
        source=str(source), hub=hub_settings, heldout_shards=1, directory=str(tmp_path / "b")
    )
    fetch_source(config, print)
    metadata = open_dataset(build_dataset(config, 16)).info.metadata
    assert metadata["provenance"] == {
        "license": "odc-by", "repo": REPO, "repo_type": "dataset", "revision": "main",
        "commit": COMMIT,
    }  # fmt: skip
    assert [f["name"] for f in metadata["files"]] == sorted(hub.files)[1:]


def test_training_does_not_fetch_and_your_own_folder_is_left_alone(hub, tmp_path):
    config = DataConfig(source=str(tmp_path / "none"), hub={"repo": REPO})
    with pytest.raises(LrkvError, match="not there yet: lrkv data build CONFIG fetches it"):
        build_dataset(config, 16)
    (tmp_path / "PROVENANCE.json").write_text('{"files": {}}')
    with pytest.raises(LrkvError, match="PROVENANCE.json is damaged: delete it"):
        build_dataset(DataConfig(source=str(tmp_path)), 16)
    (tmp_path / "PROVENANCE.json").unlink()
    (tmp_path / "a.txt").write_text("mine")
    lines = []
    fetch_source(DataConfig(source=str(tmp_path), hub={"repo": REPO}), lines.append)
    assert "taken as they are" in lines[0] and not hub.asked


@pytest.mark.parametrize(
    ("status", "code", "message", "exit_code"),
    [
        (
            401, "GatedRepo", "GatedRepoError.*see https://.*datasets/HuggingFaceFW.*hf auth login",
            EXIT_BAD_INPUT,
        ),
        (404, "RevisionNotFound", "RevisionNotFoundError", EXIT_BAD_INPUT),
        (500, "", "500", EXIT_UNAVAILABLE),
        (None, "", "ConnectError", EXIT_UNAVAILABLE),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_and_leaves_nothing(
    hub, tmp_path, monkeypatch, status, code, message, exit_code
):
    hub.status, hub.code = status, code
    if status is None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # where nobody answers
    with pytest.raises(LrkvError, match=message) as error:
        download(REPO, "main", WANTED, tmp_path / "f")
    assert not (tmp_path / "f").exists() and "\n" not in str(error.value)
    assert error.value.exit_code == exit_code


def test_a_full_disk_and_a_pattern_that_matches_nothing_are_one_line(hub, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(LrkvError, match=r"no file like \*.parquet; .* sample/10BT/000_00000.jsonl"):
        download(REPO, "main", ["*.parquet"], tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=full))
    with pytest.raises(LrkvError, match="fetching .* failed .*No space left.*continues"):
        download(REPO, "main", WANTED, tmp_path)
