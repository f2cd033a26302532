"""The jobs submitted to AI Hub, one small file each: an interrupted run is continued, not submitted again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from edgekv.bundle import MANIFEST, Bundle
from edgekv.errors import BundleError
from edgekv.machine.json_file import read_json, readable_json
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import sha256_of

FORMAT = 1
FOLDER = "hub"

Kind = Literal["upload", "dataset", "compile", "link", "profile", "infer"]
State = Literal["submitting", "submitted", "done", "failed"]


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job, or one upload.

    Attributes:
        format: version of this layout.
        kind: what the job does.
        graphs: names of the graphs in the binary, as Genie reads them.
        device: the hosted device, as the service calls it; None for uploads.
        slug: the device's folder under `hub/`; `uploads` for uploads.
        soc: part number of the device's chip.
        options: in the service's syntax.
        sources: its inputs: ids of the service, and names of the pieces that are uploaded.
        bundle_sha256: hash of the bundle's manifest.
        service: host of the service.
        state: `submitting` until the service has answered; after an interruption the job is looked up by its name.
        id: the service's id, once it has answered.
        product: id of the model that the job makes; the service gives it before the job is done.
        url: page of the job.
        reason: why it failed, in the service's words.
    """

    format: int = FORMAT
    kind: Kind
    graphs: list[str]
    device: str | None
    slug: str
    soc: str | None
    options: str
    sources: list[str]
    bundle_sha256: str
    service: str
    state: State = "submitting"
    id: str | None = None
    product: str | None = None
    url: str | None = None
    reason: str | None = None

    @property
    def key(self) -> str:
        """For each device, kind and graphs, only the newest job is kept."""
        return f"{self.slug}.{self.kind}.{'+'.join(self.graphs)}"

    @property
    def fingerprint(self) -> str:
        """Equal for equal jobs, whatever their results."""
        question = [self.kind, self.graphs, self.device, self.options, self.sources, self.bundle_sha256, self.service]
        return hashlib.sha256(msgspec.json.encode(question)).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The name that the service shows, unique to the job."""
        return f"edgekv {self.kind} {'+'.join(self.graphs)} {self.fingerprint}"


class Ledger:
    """The job files of one bundle, `hub/jobs/*.json`. Each is replaced atomically."""

    def __init__(self, bundle: Bundle, service: str) -> None:
        """Read the job files.

        Raises:
            BundleError: a file cannot be read, or belongs to another version of the bundle or to another service.
        """
        self.folder = bundle.path / FOLDER
        self.bundle_sha256 = sha256_of(bundle.path / MANIFEST)
        self.service = service
        self._jobs = self.folder / "jobs"
        self._records = {record.key: record for record in map(self._read, sorted(self._jobs.glob("*.json")))}

    @staticmethod
    def forget(bundle: Bundle) -> None:
        """Remove all job files; what was downloaded stays."""
        for path in (bundle.path / FOLDER / "jobs").glob("*.json"):
            path.unlink()

    def records(self, *kinds: Kind) -> list[JobRecord]:
        """The records of these kinds, sorted by key; of all kinds if none is given."""
        return [record for _, record in sorted(self._records.items()) if not kinds or record.kind in kinds]

    def find(self, question: JobRecord) -> JobRecord | None:
        """The record of the same job, if it was submitted before."""
        record = self._records.get(question.key)
        return record if record is not None and record.fingerprint == question.fingerprint else None

    def put(self, record: JobRecord) -> JobRecord:
        """Write a record; it replaces an earlier one with the same key."""
        self._jobs.mkdir(parents=True, exist_ok=True)
        path = self._jobs / f"{_file_name(record.key)}.json"
        with atomic_file(path) as partial:
            partial.write_bytes(readable_json(record))
        self._records[record.key] = record
        return record

    def sample(self, piece: str) -> Path:
        """Where the step of this piece is kept while a job runs it."""
        return self.folder / "samples" / f"{piece}.safetensors"

    def _read(self, path: Path) -> JobRecord:
        fix = "Discard earlier jobs with --force."
        record = read_json(path, JobRecord, expected="a job file", fix=fix)
        checks: Sequence[tuple[str, object, object]] = (
            ("format", record.format, FORMAT),
            ("bundle_sha256", record.bundle_sha256, self.bundle_sha256),
            ("service", record.service, self.service),
        )
        for field, stated, expected in checks:
            if stated != expected:
                what = "the bundle has changed since it was submitted" if field == "bundle_sha256" else stated
                raise BundleError(f"{path}: {field}", got=what, expected=expected, fix=fix)
        return record


def _file_name(key: str) -> str:
    """The key, shortened to fit a file name."""
    return key if len(key) <= 180 else f"{key[:160]}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"
