"""A checkpoint named by its hub id, fetched by the real client from a hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it downloads a snapshot of `org/model`; `org/gated` is refused."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        if path.startswith("/api/models/org/model/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                for name, raw in files.items()
            ]
            self._reply(json.dumps(listed).encode())
        elif path.startswith("/api/models/org/model"):
            names = [{"rfilename": name} for name in files]
            self._reply(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": names}).encode())
        elif path.startswith("/org/model/resolve/") and path.rpartition("/")[2] in files:
            self._reply(files[path.rpartition("/")[2]])
        else:
            self.send_error(403)

    do_HEAD = do_GET

    def _reply(self, raw: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("ETag", f'"{hashlib.sha1(raw).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that uses this hub and nothing else."""
    Hub.folder, Hub.asked = write_checkpoint(tmp_path / "served"), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    server.shutdown()


def export(name: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgekv", "export", name, "-o", str(folder), "--device", "SM8650"]
    options = ["--context", "64", "--skip-htp-check", "--json"]
    return subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_hub_id_is_downloaded_and_exported(hub, tmp_path):
    done = export("org/model", tmp_path / "bundle", hub)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"]["checkpoint"] == "org/model"


@pytest.mark.slow
def test_a_hub_id_that_cannot_be_had_is_refused(hub, tmp_path):
    done = export("org/gated", tmp_path / "bundle", hub)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        "checkpoint org/gated: got no such file or folder, and the hub said" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_a_hub_id_is_planned_without_its_weights(hub):
    command = [sys.executable, "-m", "edgekv", "plan", "org/model", "--device", "SM8650", "--context", "64", "--json"]
    done = subprocess.run(command, env=hub, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == "org/model" and not any("safetensors" in each for each in Hub.asked)


PINNED = """
import shutil, sys
from exporters.pipeline.place import Place, open_checkpoint
place = Place.of(open_checkpoint("org/model"))
shutil.rmtree(sys.argv[1])
print(place.revision, place.open().folder.name, place.open().name)
"""


@pytest.mark.slow
def test_every_worker_fetches_the_commit_that_the_command_found(hub, tmp_path):
    command = [sys.executable, "-c", PINNED, str(tmp_path / "home")]
    done = subprocess.run(command, env=hub, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [COMMIT, COMMIT, "org/model"], done.stderr
    assert Hub.asked.count("/api/models/org/model/revision/main") == 1, "by the command alone"
