"""The jobs of one command: submitted for all devices at once, each only once, then awaited."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from edgekv.bundle import Bundle, GraphRecord
from edgekv.child import TIMEOUT_VARIABLE, vendor_timeout_s
from edgekv.errors import ServiceError, UsageError
from exporters.progress import Progress, silent
from exporters.targets.aihub.account import Account
from exporters.targets.aihub.hosted import Target
from exporters.targets.aihub.ledger import JobRecord, Kind, Ledger
from exporters.targets.aihub.options import Runtime, compile_options, graph_name, link_options, run_options
from exporters.targets.aihub.pack import pack_graph
from exporters.targets.aihub.sample import take_sample

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
        for graph in self._graphs:
            dataset = self._dataset(graph, text)
            for target in targets:
                self._run_on(target, graph, "infer", [dataset])

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

    def _run_on(self, target: Target, graph: GraphRecord, kind: Kind, datasets: list[str]) -> JobRecord:
        shared = target.hosted.shares_weights and len(self._graphs) > 1
        binary = self._linked(target) if shared else self._compiled(graph, target, "qnn_dlc")
        options = run_options(graph, self._qairt)
        assert binary.product is not None, "a submitted job has a product"
        return self._job(self._question(kind, [graph], target, options, [binary.product, *datasets]), target)

    def _uploaded(self, graph: GraphRecord) -> JobRecord:
        question = self._question("upload", [graph], None, "", [self._bundle.manifest.files[graph.file].sha256])
        if (record := self._ledger.find(question)) is not None and record.state == "done":
            return record
        work = self._ledger.folder / "upload"
        work.mkdir(parents=True, exist_ok=True)
        packed = pack_graph(self._bundle, graph, work)
        with self._account.asking(f"uploading {graph.name}") as client:
            model = client.upload_model(str(packed.path), name=question.name)
        packed.path.unlink()
        return self._ledger.put(
            msgspec.structs.replace(question, state="done", id=model.model_id, product=packed.sha256)
        )

    def _dataset(self, graph: GraphRecord, text: str) -> str:
        """The id of the uploaded inputs of one step."""
        sample = take_sample(self._bundle, graph, text, self._ledger.folder / "samples")
        question = self._question("dataset", [graph], None, "", [sample.sha256])
        record = self._ledger.find(question)
        if record is None or record.id is None:
            # The service matches inputs by their order.
            entries = {port.name: [sample.inputs[port.name]] for port in self._ports[graph.name].inputs}
            with self._account.asking(f"uploading inputs of {graph.name}") as client:
                dataset = client.upload_dataset(entries, name=question.name)
            record = self._ledger.put(msgspec.structs.replace(question, state="done", id=dataset.dataset_id))
        assert record.id is not None
        return record.id

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
