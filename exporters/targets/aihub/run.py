"""Runs of a bundle's graphs on devices that AI Hub hosts: what is packed, where it runs, and its jobs."""

from __future__ import annotations

import difflib
import re
import shutil
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import onnx

from devices import CATALOGUE, Device, UnknownDeviceError, find
from edgekv.bundle import Bundle, GraphRecord, open_bundle
from edgekv.errors import BundleError, ServiceError, UsageError
from edgekv.machine.child import TIMEOUT_VARIABLE, vendor_timeout_s
from edgekv.machine.scratch import atomic_file
from exporters.compile import open_store
from exporters.graphs.parts import stored_graph
from exporters.options import RunOptions
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece, Plan
from exporters.pipeline.planning import give_bundle, give_text
from exporters.pipeline.serial import run_serial
from exporters.progress import Progress, silent
from exporters.resources import engine_bytes
from exporters.targets.aihub.account import Account
from exporters.targets.aihub.ledger import JobRecord, Kind, Ledger
from exporters.targets.aihub.options import Runtime, compile_options, graph_name, link_options, run_options
from exporters.targets.aihub.sample import SamplePiece, read_sample

if TYPE_CHECKING:
    import qai_hub

_BY_MODEL = {device.soc_model: device for device in CATALOGUE}
_LIST = "See: edgekv hub devices"


@dataclass(frozen=True, slots=True)
class HostedDevice:
    """One device as the service describes it.

    Attributes:
        name: as the service calls it, such as `Samsung Galaxy S24 (Family)`.
        os: version of its operating system.
        attributes: `key:value` pairs, such as `soc-model:57`.
    """

    name: str
    os: str
    attributes: tuple[str, ...]

    @property
    def chip(self) -> Device | None:
        """The chip, if the catalogue has it."""
        values = [text.removeprefix("soc-model:") for text in self.attributes if text.startswith("soc-model:")]
        return next((_BY_MODEL[int(value)] for value in values if value.isdecimal() and int(value) in _BY_MODEL), None)

    @property
    def runs_qnn(self) -> bool:
        """Whether it runs context binaries and DLCs."""
        return "framework:qnn" in self.attributes

    @property
    def shares_weights(self) -> bool:
        """Whether linked graphs can share weights on it."""
        return "htp-supports-weight-sharing:true" in self.attributes

    @property
    def slug(self) -> str:
        """The name as a folder: `samsung_galaxy_s24_family`."""
        return re.sub(r"[^a-z0-9]+", "_", self.name.casefold().replace("+", " plus ")).strip("_")


@dataclass(frozen=True, slots=True)
class Target:
    """A hosted device whose chip edgekv knows."""

    hosted: HostedDevice
    chip: Device


def list_hosted(account: Account) -> list[HostedDevice]:
    """All devices of the service, in its order.

    Raises:
        ServiceError: the service did not answer, or refused the token.
    """
    with account.asking("listing devices") as client:
        return [HostedDevice(device.name, device.os, tuple(device.attributes)) for device in client.get_devices()]


def choose_targets(hosted: Sequence[HostedDevice], names: Sequence[str], kv_dtype: str) -> list[Target]:
    """The hosted devices of these names, each once.

    Args:
        hosted: the available devices.
        names: a device as the service calls it, or any name of a chip that the catalogue has. For a chip, a
            `(Family)` of devices is preferred: whichever of them is free serves.
        kv_dtype: integer type of the bundle's cache.

    Raises:
        UsageError: a name of no hosted device, or a device that cannot run the bundle.
        UnknownDeviceError: a name that neither the service nor the catalogue has.
    """
    targets = {target.hosted.slug: target for target in (_choose(hosted, name, kv_dtype) for name in names)}
    if not targets:
        raise UsageError("--devices", got="none", expected="at least one device", fix=_LIST)
    return list(targets.values())


def _choose(hosted: Sequence[HostedDevice], name: str, kv_dtype: str) -> Target:
    named = [entry for entry in hosted if entry.name.casefold() == name.strip().casefold()]
    if named:
        chip = named[-1].chip  # the newest OS is last
        device = named[-1]
        if chip is None:
            raise UsageError(
                f"--devices {name}", got="a chip that edgekv does not know", expected=_chips(hosted), fix=_LIST
            )
    else:
        chip = _catalogued(hosted, name)
        same = [entry for entry in hosted if entry.chip is chip and entry.runs_qnn]
        if not same:
            raise UsageError(
                f"--devices {name}", got=f"no hosted device with {chip.soc}", expected=_chips(hosted), fix=_LIST
            )
        device = next((candidate for candidate in same if candidate.name.endswith("(Family)")), same[0])
    if not device.runs_qnn:
        raise UsageError(f"--devices {name}", got="a device without framework:qnn", expected=_chips(hosted), fix=_LIST)
    if not chip.supports_kv(kv_dtype):
        raise UsageError(
            f"--devices {name}",
            got=f"{chip.soc} (V{chip.arch})",
            expected=f"V73 or later, for the bundle's {kv_dtype} cache",
            fix="Export with --kv u8, or choose a later device.",
        )
    return Target(device, chip)


def _catalogued(hosted: Sequence[HostedDevice], name: str) -> Device:
    try:
        return find(name)
    except UnknownDeviceError:
        near = difflib.get_close_matches(name, [device.name for device in hosted], n=2)
        if not near:
            raise
        raise UsageError(f"--devices {name}", got="no such device", expected=" or ".join(near), fix=_LIST) from None


def _chips(hosted: Sequence[HostedDevice]) -> str:
    chips = sorted({device.chip.soc for device in hosted if device.chip is not None and device.runs_qnn})
    return f"a hosted device with one of {', '.join(chips)}"


_BLOCK_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the earliest date of a zip: the same graph always gives the same file


@dataclass(frozen=True, slots=True)
class PackPiece(Piece):
    """A graph as it is uploaded.

    Attributes:
        bundle: name of the bundle.
        graph: the graph.
    """

    kind: ClassVar[str] = "pack"

    bundle: str
    graph: str

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.bundle,)

    def make(self, folder: Path, inputs: Inputs) -> object:
        bundle = open_bundle(inputs.bundle(self.bundle), verify=False)
        pack_graph(bundle, next(graph for graph in bundle.manifest.graphs if graph.name == self.graph), folder)
        return None


@dataclass(frozen=True, slots=True)
class _Extent:
    """Bytes of a shard, and where they go in the .data file."""

    file: str
    source: int
    target: int
    length: int


def pack_graph(bundle: Bundle, graph: GraphRecord, folder: Path) -> Path:
    """Write `<graph name>.onnx.zip` into a folder, complete or not at all; returns its path.

    The weights are copied in blocks of 1 MiB, because a graph may be larger than the memory. They are stored
    uncompressed: integer weights hardly shrink.

    Raises:
        BundleError: a weight of the graph is not in the bundle.
    """
    name = graph_name(graph)
    model = stored_graph(bundle.graph_path(graph))
    model.graph.name = name
    extents = _redirect(model, bundle, graph, f"{name}.data")
    target = folder / f"{name}.onnx.zip"
    with (
        atomic_file(target) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        archive.writestr(zipfile.ZipInfo(f"{name}/{name}.onnx", _TIMESTAMP), model.SerializeToString())
        with archive.open(zipfile.ZipInfo(f"{name}/{name}.data", _TIMESTAMP), "w", force_zip64=True) as out:
            written = 0
            for extent in extents:
                out.write(bytes(extent.target - written))
                with (bundle.path / extent.file).open("rb") as shard:
                    shard.seek(extent.source)
                    left = extent.length
                    while left:
                        block = shard.read(min(_BLOCK_BYTES, left))
                        out.write(block)
                        left -= len(block)
                written = extent.target + extent.length
    return target


def _redirect(model: onnx.ModelProto, bundle: Bundle, graph: GraphRecord, data: str) -> list[_Extent]:
    """Point every external weight into one file; what to copy there, in order."""
    extents: dict[tuple[str, int, int], _Extent] = {}
    end = 0
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file, source, length = entries["location"], int(entries.get("offset", 0)), int(entries["length"])
        listed = bundle.manifest.files.get(file)
        if listed is None or source + length > listed.bytes:
            raise BundleError(
                f"{graph.file}: {tensor.name}",
                got=f"bytes {source} to {source + length} of {file}",
                expected="bytes of a file of the bundle",
                fix="Export the bundle again.",
            )
        key = (file, source, length)
        if key not in extents:
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            extents[key] = _Extent(file, source, start, length)
            end = start + length
        del tensor.external_data[:]
        for name, value in (("location", data), ("offset", extents[key].target), ("length", length)):
            tensor.external_data.add(key=name, value=str(value))
    return list(extents.values())


_UPLOADS = "uploads"
_PAGE, _PAGES = 50, 4


class HubRun:
    """Submits a command's jobs to the service and follows them.

    Dependent jobs are submitted immediately: the service names the future product of a job immediately and
    schedules what depends on it.

    Attributes:
        records: the jobs of this run, submitted now or by an earlier run.
    """

    def __init__(self, bundle: Bundle, account: Account, ledger: Ledger, *, qairt: str | None = None) -> None:
        self.records: list[JobRecord] = []
        self._bundle = bundle
        self._account = account
        self._ledger = ledger
        self._qairt = qairt
        graphs = (graph for graph in bundle.manifest.graphs if graph.role != "score")
        self._graphs = sorted(graphs, key=lambda graph: (graph.ar, graph.context))
        self._plan, self._inputs = Plan(), Inputs(open_store(RunOptions()), None)
        self._engine_bytes = engine_bytes(sum(file.bytes for file in bundle.manifest.files.values()))
        self._given = give_bundle(self._plan, bundle)
        self._inputs.adopt(self._given, bundle.path)
        self._ports = {graph.name: bundle.manifest.interface.graph(graph) for graph in self._graphs}

    def compile(self, targets: Sequence[Target], runtime: Runtime) -> None:
        """A compile job for each graph and device; each graph is uploaded once for all of them.

        Raises:
            ServiceError: the service refused, failed or could not be reached.
        """
        for graph in self._graphs:
            for target in targets:
                self._compiled(graph, target, runtime)

    def link(self, targets: Sequence[Target]) -> None:
        """One context binary for each device, in which the graphs share their weights.

        Raises:
            UsageError: a device that does not share weights; nothing was submitted.
            ServiceError: the service refused, failed or could not be reached.
        """
        if len(self._graphs) > 1 and (alone := [t for t in targets if not t.hosted.shares_weights]):
            raise UsageError(
                f"--devices {alone[0].hosted.name}",
                got="a device without htp-supports-weight-sharing",
                expected="a device on which graphs can share weights",
                fix="Use: edgekv hub compile --runtime qnn_context_binary",
            )
        for target in targets:
            self._linked(target)

    def profile(self, targets: Sequence[Target]) -> None:
        """A profile of each graph on each device, of the linked binary where graphs can share weights.

        Raises:
            ServiceError: the service refused, failed or could not be reached.
        """
        for target in targets:
            for graph in self._graphs:
                self._run_on(target, graph, "profile", [])

    def infer(self, targets: Sequence[Target], text: str) -> None:
        """One real step of each graph on each device, of the same binary; the inputs are uploaded once.

        Raises:
            UsageError: the text is too short.
            ServiceError: the service refused, failed or could not be reached.
        """
        run_text = give_text(self._plan, text)
        for graph in self._graphs:
            dataset = self._dataset(graph, run_text)
            for target in targets:
                self._run_on(target, graph, "infer", dataset)
        named = {self._ledger.sample(other.sources[-1]) for other in self._ledger.records("dataset", "infer")}
        for path in self._ledger.sample("").parent.glob("*.safetensors"):
            if path not in named:
                path.unlink()
        self._inputs.store.remove([run_text])

    def wait(self, poll_s: float, progress: Progress = silent) -> None:
        """Poll the run's jobs until all are done or failed; each result is recorded at once.

        Raises:
            ServiceError: the service could not be reached, or did not end the jobs within `vendor_timeout_s`; the jobs
                continue on the service.
        """
        limit_s = vendor_timeout_s()
        end = time.monotonic() + limit_s
        while True:
            self.refresh()
            waiting = sum(record.state == "submitted" for record in self.records)
            progress("AI Hub jobs", len(self.records) - waiting, len(self.records))
            if not waiting:
                return
            if time.monotonic() + poll_s > end:
                raise ServiceError(
                    "AI Hub",
                    got=f"{waiting} of {len(self.records)} jobs unfinished after {limit_s:g} s",
                    expected="all of them",
                    fix=f"Run the command again: it continues. {TIMEOUT_VARIABLE} allows more time.",
                )
            time.sleep(poll_s)

    def refresh(self) -> None:
        """Poll once the jobs of this run that are neither done nor failed.

        Raises:
            ServiceError: the service refused, failed or could not be reached.
        """
        for at, record in enumerate(self.records):
            if record.state != "submitted" or record.id is None:
                continue
            with self._account.asking(f"{record.name}, job {record.id}") as client:
                status = client.get_job(record.id).get_status()
            if status.finished:
                done = "done" if status.success else "failed"
                reason = None if status.success else status.message or "no reason given"
                self.records[at] = self._ledger.put(msgspec.structs.replace(record, state=done, reason=reason))

    def resume(self, records: Sequence[JobRecord]) -> None:
        """Continue jobs of earlier runs: those with an id, and those that the service knows by name."""
        for record in records:
            continued = record if record.id is not None else self._look_up(record)
            self.records.append(continued or record)

    # ------------------------------------------------------------------ single jobs

    def _compiled(self, graph: GraphRecord, target: Target, runtime: Runtime) -> JobRecord:
        options = compile_options(runtime, graph, self._ports[graph.name], self._qairt)
        model = self._uploaded(graph)
        assert model.id is not None, "an upload that is done has an id"
        return self._job(self._question("compile", [graph], target, options, [model.id]), target)

    def _linked(self, target: Target) -> JobRecord:
        compiled = [self._compiled(graph, target, "qnn_dlc") for graph in self._graphs]
        options = link_options(self._qairt)
        models = [record.product for record in compiled if record.product is not None]
        return self._job(self._question("link", self._graphs, target, options, models), target)

    def _run_on(self, target: Target, graph: GraphRecord, kind: Kind, dataset: list[str]) -> JobRecord:
        shared = target.hosted.shares_weights and len(self._graphs) > 1
        binary = self._linked(target) if shared else self._compiled(graph, target, "qnn_dlc")
        options = run_options(graph, self._qairt)
        assert binary.product is not None, "a submitted job has a product"
        return self._job(self._question(kind, [graph], target, options, [binary.product, *dataset]), target)

    def _uploaded(self, graph: GraphRecord) -> JobRecord:
        name = self._plan.put(PackPiece(self._given, graph.name), self._engine_bytes)
        question = self._question("upload", [graph], None, "", [name])
        if (record := self._ledger.find(question)) is not None and record.state == "done":
            return record
        (packed,) = self._made(name).values()
        with self._account.asking(f"uploading {graph.name}") as client:
            model = client.upload_model(str(packed), name=question.name)
        return self._uploaded_once(question, model.model_id)

    def _dataset(self, graph: GraphRecord, text: str) -> list[str]:
        """The id of the uploaded inputs of one step, and the name of its piece."""
        name = self._plan.put(SamplePiece(self._given, graph.name, text), self._engine_bytes)
        question, kept = self._question("dataset", [graph], None, "", [name]), self._ledger.sample(name)
        record = self._ledger.find(question)
        if record is None or record.id is None or not kept.is_file():
            (made,) = self._made(name).values()
            sample = read_sample(made)
            # The service matches inputs by their order.
            entries = {port.name: [sample.inputs[port.name]] for port in self._ports[graph.name].inputs}
            with self._account.asking(f"uploading inputs of {graph.name}") as client:
                dataset = client.upload_dataset(entries, name=question.name)
            kept.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(kept) as partial:
                shutil.copyfile(made, partial)
            record = self._uploaded_once(question, dataset.dataset_id)
        assert record.id is not None
        return [record.id, name]

    def _made(self, name: str) -> dict[str, Path]:
        """The files of a piece, made now unless an interrupted command has finished it."""
        run_serial(self._plan, [name], self._inputs, silent, resume=True)
        return self._inputs.store.files(name)

    def _uploaded_once(self, question: JobRecord, id: str) -> JobRecord:
        """Note what was uploaded; its piece has done its work."""
        record = self._ledger.put(msgspec.structs.replace(question, state="done", id=id))
        self._inputs.store.remove(question.sources)
        return record

    # ------------------------------------------------------------------ submitting

    def _question(
        self, kind: Kind, graphs: Sequence[GraphRecord], target: Target | None, options: str, sources: list[str]
    ) -> JobRecord:
        return JobRecord(
            kind=kind,
            graphs=[graph_name(graph) for graph in graphs],
            device=None if target is None else target.hosted.name,
            slug=_UPLOADS if target is None else target.hosted.slug,
            soc=None if target is None else target.chip.soc,
            options=options,
            sources=sources,
            bundle_sha256=self._ledger.bundle_sha256,
            service=self._ledger.service,
        )

    def _job(self, question: JobRecord, target: Target) -> JobRecord:
        """The record of a job of an earlier run, of this one, or submitted now. A failed job is submitted again."""
        for record in self.records:
            if record.key == question.key:
                return record
        known = self._ledger.find(question)
        if known is not None and known.id is None:
            known = self._look_up(known)
        if known is None or known.state == "failed":
            self._ledger.put(question)
            with self._account.asking(f"submitting {question.name}") as client:
                known = self._ledger.put(_submitted(question, _submit(client, question, target)))
        self.records.append(known)
        return known

    def _look_up(self, record: JobRecord) -> JobRecord | None:
        """A job whose submission was interrupted, if the service has received it."""
        with self._account.asking(f"looking for {record.name}") as client:
            for page in range(_PAGES):
                summaries = client.get_job_summaries(offset=page * _PAGE, limit=_PAGE)
                for summary in summaries:
                    if summary.name == record.name and not summary.status.failure:
                        return self._ledger.put(_submitted(record, client.get_job(summary.job_id)))
                if len(summaries) < _PAGE:
                    break
        return None


def check_all_done(records: Sequence[JobRecord]) -> None:
    """Report failed jobs.

    Raises:
        ServiceError: a job has failed.
    """
    if failed := [record for record in records if record.state == "failed"]:
        first = failed[0]
        raise ServiceError(
            f"AI Hub: {len(failed)} of {len(records)} jobs",
            got=f"{first.kind} of {', '.join(first.graphs)} for {first.device}: {first.reason}",
            expected="finished jobs",
            fix=f"See {first.url}. Run the same command again: it submits only the failed jobs.",
        )


def _submit(client: qai_hub.Client, question: JobRecord, target: Target) -> qai_hub.Job:
    """Submit a job for one device."""
    device, name, options = _device(target), question.name, question.options
    first, *rest = question.sources
    job: qai_hub.Job | list[Any]
    if question.kind == "compile":
        job = client.submit_compile_job(client.get_model(first), device=device, name=name, options=options)
    elif question.kind == "link":
        models = [client.get_model(source) for source in question.sources]
        job = client.submit_link_job([*models], device=device, name=name, options=options)
    else:
        inputs, profiles = client.get_dataset(rest[0]) if rest else None, question.kind == "profile"
        job = client.submit_inference_job(
            client.get_model(first), device, inputs, name=name, options=options, retry=False, profile=profiles
        )
    assert not isinstance(job, list), "one device, one job"
    return job


def _submitted(question: JobRecord, job: qai_hub.Job) -> JobRecord:
    """The question with the service's answer."""
    product = None
    if question.kind in ("compile", "link"):
        model = job.get_target_model()  # type: ignore[attr-defined, unused-ignore]
        if model is None:
            raise ValueError(f"job {job.job_id} does not name its output model")
        product = model.model_id
    return msgspec.structs.replace(question, state="submitted", id=job.job_id, url=job.url, product=product)


def _device(target: Target) -> qai_hub.Device:
    import qai_hub

    return qai_hub.Device(target.hosted.name, target.hosted.os)
