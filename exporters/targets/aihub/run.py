"""The jobs of one command: submitted for all devices at once, each only once, then awaited."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgekv.bundle import Bundle, GraphRecord
from edgekv.errors import ServiceError, UsageError
from edgekv.machine.child import TIMEOUT_VARIABLE, vendor_timeout_s
from edgekv.machine.scratch import atomic_file
from exporters.compile import open_store
from exporters.options import RunOptions
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Plan
from exporters.pipeline.planning import give_bundle, give_text
from exporters.pipeline.serial import run_serial
from exporters.progress import Progress, silent
from exporters.resources import engine_bytes
from exporters.targets.aihub.account import Account
from exporters.targets.aihub.hosted import Target
from exporters.targets.aihub.ledger import JobRecord, Kind, Ledger
from exporters.targets.aihub.options import Runtime, compile_options, graph_name, link_options, run_options
from exporters.targets.aihub.pack import PackPiece
from exporters.targets.aihub.sample import SamplePiece, read_sample

if TYPE_CHECKING:
    import qai_hub

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
        given = give_text(self._plan, text)
        for graph in self._graphs:
            dataset = self._dataset(graph, given)
            for target in targets:
                self._run_on(target, graph, "infer", dataset)
        named = {self._ledger.sample(each.sources[-1]) for each in self._ledger.records("dataset", "infer")}
        for path in self._ledger.sample("").parent.glob("*.safetensors"):
            if path not in named:
                path.unlink()
        self._inputs.store.remove([given])

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
            found = record if record.id is not None else self._look_up(record)
            self.records.append(found or record)

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
        models = [client.get_model(each) for each in question.sources]
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
