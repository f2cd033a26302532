"""A service on this machine that answers the real `qai_hub` client as Qualcomm AI Hub does.

It proves edgekv's side of the conversation. It is not AI Hub: no phone runs anything here. What it can do for real it
does: a compile job makes a DLC with Qualcomm's own libraries, a link job a context binary for the chip that was asked
for, and an inference job runs the uploaded graph on ONNX Runtime's CPU. Times in profiles are of this machine.
"""

from __future__ import annotations

import email
import email.policy
import io
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h5py
import numpy as np
import onnx
import onnxruntime as ort
from qai_hub import public_api_pb2 as pb
from qai_hub.util.dataset_entries_converters import dataset_entries_to_h5, h5_to_dataset_entries

from devices import CATALOGUE
from edgekv.qnn.worker import HtpStep
from exporters.htp.binary import read_target
from exporters.htp.check import run_steps

TOKEN = "s3cret-t0ken-of-nobody"
PART_BYTES = 100_000
_PROTOBUF = "application/x-protobuf"
_COMPILED: dict[str, bytes] = {}
"""What was compiled before, by content and options: one compilation serves all tests of a process."""


def device(name: str, soc_model: int, *, os: str = "14", shares: bool = True, framework: str = "qnn") -> pb.Device:
    attributes = [f"framework:{framework}", f"soc-model:{soc_model}", "vendor:samsung"]
    return pb.Device(name=name, os=os, attributes=attributes + ["htp-supports-weight-sharing:true"] * shares)


DEVICES = [
    device("Samsung Galaxy S24", 57),
    device("Samsung Galaxy S24 (Family)", 57),
    device("Samsung Galaxy S25 (Family)", 69, os="15"),
    device("Dragonwing RB3 Gen 2", 93, shares=False),
    device("Pixel 9", 4711, framework="tflite"),
]


@dataclass
class Fault:
    """What goes wrong with the next `times` requests of this method and path.

    `status`: this HTTP status; `drop`: the connection ends without an answer; `cut`: it ends in the middle of one;
    `stall`: the request is carried out, and the answer never comes while `AiHub.stalled` is not set.
    """

    method: str
    path: str
    status: int = 0
    kind: str = "status"
    text: str = ""
    times: int = 1


@dataclass
class Model:
    raw: bytes = b""
    type: int = pb.MODEL_TYPE_ONNX
    producer: str = ""
    parts: dict[int, bytes] = field(default_factory=dict)
    name: str = ""


class AiHub:
    """The state of the service.

    Attributes:
        faults: see `Fault`.
        failures: by kind of job and device, the reason with which such jobs fail.
        patience: how often a job is asked after before it runs.
        spoil: inference changes the last bit of every output.
        log: method and path of every request.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.failures: dict[tuple[str, str], str] = {}
        self.patience = 1
        self.spoil = False
        self.numbered_outputs = False
        self.stalled = threading.Event()
        self.log: list[str] = []
        self.models: dict[str, Model] = {}
        self.datasets: dict[str, bytes] = {}
        self.jobs: dict[str, pb.Job] = {}
        self.asked: dict[str, int] = {}
        self.results: dict[str, pb.JobResult] = {}
        self.lock = threading.RLock()
        hub = self

        class Bound(Handler):
            pass

        Bound.hub = hub
        self.server = Server(("127.0.0.1", 0), Bound)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.stalled.set()
        self.server.shutdown()
        self.server.server_close()

    def count(self, request: str) -> int:
        return self.log.count(request)

    # ------------------------------------------------------------------ jobs

    def make_model(self, **fields: Any) -> str:
        model_id = f"m{len(self.models):06d}"
        self.models[model_id] = Model(**fields)
        return model_id

    def submit(self, job: pb.Job) -> str:
        job_id = f"j{len(self.jobs):06d}"
        kind = job.WhichOneof("job")
        inner = getattr(job, kind)
        setattr(inner, kind.replace("_job", "_job_id"), job_id)
        inner.job_state = pb.JOB_STATE_CREATED
        if kind == "compile_job":
            inner.device.CopyFrom(inner.devices.devices[0])
            binary = "--target_runtime qnn_context_binary" in inner.options
            made = pb.MODEL_TYPE_QNN_CONTEXT_BINARY if binary else pb.MODEL_TYPE_QNN_DLC
            inner.target_model.CopyFrom(self.model_pb(self.make_model(type=made, producer=job_id)))
        elif kind == "link_job":
            made = pb.MODEL_TYPE_QNN_CONTEXT_BINARY
            inner.target_model.CopyFrom(self.model_pb(self.make_model(type=made, producer=job_id)))
        self.jobs[job_id] = job
        self.asked[job_id] = 0
        return job_id

    def look_at(self, job_id: str) -> pb.Job:
        """The job; it runs once it was asked after often enough."""
        job = self.jobs[job_id]
        self.asked[job_id] += 1
        if self.asked[job_id] > self.patience:
            self.finish(job_id)
        return job

    def finish(self, job_id: str) -> None:
        kind = self.jobs[job_id].WhichOneof("job")
        job = getattr(self.jobs[job_id], kind)
        if job.job_state in (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED):
            return
        reason = self.failures.get((kind.removesuffix("_job"), job.device.name), "")
        sources = job.models.models if kind == "link_job" else [job.model]
        for source in sources:
            producer = self.models[source.model_id].producer
            if producer and not reason:
                self.finish(producer)
                state = getattr(self.jobs[producer], self.jobs[producer].WhichOneof("job")).job_state
                reason = "The job that makes the model has failed." if state == pb.JOB_STATE_FAILED else ""
        if not reason:
            getattr(self, kind)(job_id, job)
        job.job_state = pb.JOB_STATE_FAILED if reason else pb.JOB_STATE_DONE
        job.failure_reason = reason

    def compile_job(self, job_id: str, job: pb.CompileJob) -> None:
        raw = self.models[job.model.model_id].raw
        target = self.models[job.target_model.model_id]
        dlc = target.type == pb.MODEL_TYPE_QNN_DLC
        target.raw = _cached(job.device, dlc, [raw])

    def link_job(self, job_id: str, job: pb.LinkJob) -> None:
        sources = [self.source_of(model.model_id) for model in job.models.models]
        self.models[job.target_model.model_id].raw = _cached(job.device, False, sources)

    def source_of(self, model_id: str) -> bytes:
        """The uploaded graph behind a compiled model."""
        model = self.models[model_id]
        return self.source_of(self.jobs[model.producer].compile_job.model.model_id) if model.producer else model.raw

    def inference_job(self, job_id: str, job: pb.InferenceJob) -> None:
        graph = self.chosen_graph(job)
        with tempfile.TemporaryDirectory() as folder:
            path = _unpack(graph, Path(folder))
            session = ort.InferenceSession(str(path), _cpu_options(), providers=["CPUExecutionProvider"])
            if job.dataset.dataset_id:
                with h5py.File(io.BytesIO(self.datasets[job.dataset.dataset_id]), "r") as file:
                    inputs = {name: values[0] for name, values in h5_to_dataset_entries(file).items()}
            else:
                types = {"int32": np.int32, "uint16": np.uint16, "uint8": np.uint8, "int16": np.int16}
                inputs = {p.name: np.zeros(p.shape, types[p.type[7:-1]]) for p in session.get_inputs()}
            started = time.perf_counter_ns()
            outputs = session.run(None, inputs)
            took_us = (time.perf_counter_ns() - started) // 1000
            names = [p.name for p in session.get_outputs()]
        result = pb.InferenceJobResult(inference_job_id=job_id)
        if job.dataset.dataset_id:
            if self.numbered_outputs:
                names = [f"output_{i}" for i in range(len(names))]
            buffer = io.BytesIO()
            with h5py.File(buffer, "w") as file:
                spoiled = {n: [v ^ np.asarray(self.spoil, v.dtype)] for n, v in zip(names, outputs, strict=True)}
                dataset_entries_to_h5(spoiled, file)
            result.output_dataset_id = f"d{len(self.datasets):06d}"
            self.datasets[result.output_dataset_id] = buffer.getvalue()
        if job.is_profiling_on:
            detail = result.detail
            detail.major_version, detail.minor_version = 1, 2
            detail.execution_time = max(took_us, 1)
            detail.cold_load_time = 1000
            detail.after_execution_peak_memory = 1 << 20
            layer = pb.ProfileDetail.DESCRIPTOR.fields_by_name["layer_details"].message_type._concrete_class
            detail.layer_details.append(layer(name="layer", layer_type_name="MatMul", compute_unit=pb.COMPUTE_UNIT_NPU))
        self.results[job_id] = pb.JobResult(inference_job_result=result)

    def chosen_graph(self, job: pb.InferenceJob) -> bytes:
        """The one graph of the binary that the options name."""
        model = self.models[job.model.model_id]
        producer = self.jobs[model.producer]
        linked = producer.WhichOneof("job") == "link_job"
        ids = [each.model_id for each in producer.link_job.models.models] if linked else [job.model.model_id]
        graphs = {_unpacked_name(raw): raw for raw in map(self.source_of, ids)}
        wanted = job.options.partition("context_enable_graphs=")[2].split()[0]
        return graphs[wanted]

    def model_pb(self, model_id: str) -> pb.Model:
        model = self.models[model_id]
        return pb.Model(model_id=model_id, model_type=model.type, producer_id=model.producer, name=model.name)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no fault of the service."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def configure(file: Path, url: str, token: str = TOKEN) -> dict[str, str]:
    """Write the client's configuration; the environment in which it is found, and in which nothing else is."""
    file.write_text(f"[api]\napi_token = {token}\napi_url = {url}\nweb_url = {url}\n")
    nowhere = "http://127.0.0.1:9"
    proxies = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere}
    return {"QAIHUB_CLIENT_INI": str(file), "HOME": str(file.parent), **proxies}


class Handler(BaseHTTPRequestHandler):
    """The service's HTTP face: `/api/v1/` speaks protobuf, `/blob/` stands for the storage behind it."""

    hub: AiHub
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        url = urlsplit(self.path)
        body = self._body()
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.hub.log.append(f"{self.command} {url.path}")
        fault = self._fault(url.path)
        if fault is not None and fault.kind == "drop":
            self.close_connection = True
            return
        if fault is not None and fault.kind == "status":
            self._reply(fault.status, fault.text.encode(), "text/plain")
            return
        if url.path.startswith("/api/") and self.headers["Authorization"] != f"token {TOKEN}":
            self._reply(401, b"", "text/plain")
            return
        with self.hub.lock:
            status, raw, kind = self._answer([part for part in url.path.split("/") if part], query, body)
        if fault is not None and fault.kind == "stall":
            self.hub.stalled.wait(60)
            self.close_connection = True
            return
        self._reply(status, raw, kind, cut=fault is not None and fault.kind == "cut")

    do_GET = do_POST = do_PUT = do_PATCH = _handle

    def _answer(self, path: list[str], query: dict[str, str], body: bytes) -> tuple[int, bytes, str]:
        hub, method = self.hub, self.command
        if path[0] == "blob":
            return self._blob(path[1:], body)
        match [method, *path[2:]]:
            case ["GET", "devices"]:
                named = [d for d in DEVICES if query.get("name", d.name) == d.name and query.get("os", d.os) == d.os]
                return _proto(pb.DeviceList(devices=named[:1] if query.get("select") == "True" else named))
            case ["POST", "models"]:
                sent = pb.Model.FromString(body)
                return _proto(pb.CreateUpdateResponse(id=hub.make_model(type=sent.model_type, name=sent.name)))
            case ["GET", "models", model_id, "multipart_upload"]:
                parts = -(-int(query["file_size"]) // PART_BYTES)
                urls = [f"{hub.url}/blob/model/{model_id}/{part}" for part in range(parts)]
                answer = pb.FileMultipartUploadURL(urls=urls, upload_id="u", max_part_size=PART_BYTES)
                return _proto(pb.FileUploadResponse(multipart_url=answer))
            case ["POST", "models", model_id, "multipart_upload"]:
                model = hub.models[model_id]
                model.raw = b"".join(raw for _, raw in sorted(model.parts.items()))
                return _proto(pb.CreateUpdateResponse(id=model_id))
            case ["GET", "models", model_id, "download"]:
                suffix = "dlc" if hub.models[model_id].type == pb.MODEL_TYPE_QNN_DLC else "bin"
                place = pb.FileDownloadURL(url=f"{hub.url}/blob/model/{model_id}", filename=f"job_{model_id}.{suffix}")
                return _proto(pb.FileDownloadResponse(url=place))
            case ["GET", "models", model_id] if model_id in hub.models:
                return _proto(hub.model_pb(model_id))
            case ["POST", "datasets"]:
                dataset_id = f"d{len(hub.datasets):06d}"
                hub.datasets[dataset_id] = b""
                return _proto(pb.CreateUpdateResponse(id=dataset_id))
            case ["GET", "datasets", dataset_id, "upload_url"]:
                place = pb.FileUploadURL(url=f"{hub.url}/blob/dataset/{dataset_id}", file_field_name="file")
                return _proto(pb.FileUploadResponse(url=place))
            case ["POST" | "PATCH", "datasets", dataset_id, *_]:
                return _proto(pb.CreateUpdateResponse(id=dataset_id))
            case ["GET", "datasets", dataset_id, "download_data"]:
                place = pb.FileDownloadURL(url=f"{hub.url}/blob/dataset/{dataset_id}", filename="data.h5")
                return _proto(pb.FileDownloadResponse(url=place))
            case ["GET", "datasets", dataset_id] if dataset_id in hub.datasets:
                return _proto(pb.Dataset(dataset_id=dataset_id, permanent=True))
            case ["POST", "jobs"]:
                return _proto(pb.CreateUpdateResponse(id=hub.submit(pb.Job.FromString(body))))
            case ["GET", "jobs", job_id] if job_id in hub.jobs:
                return _proto(hub.look_at(job_id))
            case ["GET", "jobs", job_id, "result"]:
                return _proto(hub.results[job_id])
            case ["GET", "job_summaries"]:
                return _proto(self._summaries(int(query.get("offset", 0)), int(query["limit"])))
        return 404, b"Not found.", "text/plain"

    def _blob(self, path: list[str], body: bytes) -> tuple[int, bytes, str]:
        match [self.command, *path]:
            case ["PUT", "model", model_id, part]:
                self.hub.models[model_id].parts[int(part)] = body
                return 200, b"", "text/plain"
            case ["GET", "model", model_id]:
                return 200, self.hub.models[model_id].raw, "application/octet-stream"
            case ["POST", "dataset", dataset_id]:
                head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                form = email.message_from_bytes(head + body, policy=email.policy.HTTP)
                self.hub.datasets[dataset_id] = next(form.iter_parts()).get_payload(decode=True)
                return 204, b"", "text/plain"
            case ["GET", "dataset", dataset_id]:
                return 200, self.hub.datasets[dataset_id], "application/octet-stream"
        return 404, b"", "text/plain"

    def _summaries(self, offset: int, limit: int) -> pb.JobSummaryList:
        answer = pb.JobSummaryList()
        for job_id, job in list(reversed(self.hub.jobs.items()))[offset : offset + limit]:
            kind = job.WhichOneof("job")
            inner = getattr(job, kind)
            summary = getattr(answer.job_summaries.add(), f"{kind}_summary")
            summary.job_id, summary.name, summary.job_state = job_id, inner.name, inner.job_state
            summary.device_name = inner.device.name
        return answer

    def _fault(self, path: str) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times and fault.method == self.command and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _reply(self, status: int, raw: bytes, kind: str, *, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("ETag", f'"{sha256(raw).hexdigest()[:8]}"')
        self.end_headers()
        self.wfile.write(raw[: len(raw) // 2] if cut else raw)
        self.close_connection |= cut

    def log_message(self, *_: object) -> None:
        pass


def _proto(message: Any) -> tuple[int, bytes, str]:
    return 200, message.SerializeToString(), _PROTOBUF


def _cached(hosted: pb.Device, dlc: bool, sources: list[bytes]) -> bytes:
    soc_model = next(int(a.removeprefix("soc-model:")) for a in hosted.attributes if a.startswith("soc-model:"))
    key = f"{'dlc' if dlc else soc_model} {[sha256(raw).hexdigest() for raw in sources]}"  # a DLC is for any chip
    if key not in _COMPILED:
        _COMPILED[key] = _compile(soc_model, dlc, sources)
    return _COMPILED[key]


def _compile(soc_model: int, dlc: bool, sources: list[bytes]) -> bytes:
    """A DLC, or a context binary in which the sources share their weights; by Qualcomm's libraries."""
    chip = next(each for each in CATALOGUE if each.soc_model == soc_model)
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), []
        for number, raw in enumerate(sources):
            path = _unpack(raw, folder / str(number))
            if dlc:
                import onnxruntime_qnn  # not installed where only the conversation is tested

                library = Path(onnxruntime_qnn.__file__).parent / "libQnnIr.so"
                provider = {"qnn_ir_backend_path": str(library), "dump_qnn_ir_dlc": "1", "dump_qnn_ir_dlc_dir": name}
                steps.append(HtpStep(model=str(path), provider_options=provider))
                continue
            wrapper = str(folder / f"{number}.onnx")
            config = {"ep.context_enable": "1", "ep.context_embed_mode": "0", "ep.context_file_path": wrapper}
            if len(sources) > 1:
                config["ep.share_ep_contexts"] = "1"
                if number == len(sources) - 1:
                    config["ep.stop_share_ep_contexts"] = "1"
            steps.append(HtpStep(model=str(path), session_config=config))
        run_steps(chip, steps)
        (made,) = folder.glob("*.dlc" if dlc else "*_qnn.bin")
        assert dlc or read_target(made).soc == chip.soc
        return made.read_bytes()


def _unpack(raw: bytes, folder: Path) -> Path:
    """The one .onnx of an uploaded folder, beside its one .data file."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        archive.extractall(folder)
    (graph,) = folder.glob("*/*.onnx")
    assert {path.suffix for path in graph.parent.iterdir()} == {".onnx", ".data"}
    return graph


def _unpacked_name(raw: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".onnx")]
        return onnx.load_model_from_string(archive.read(name)).graph.name


def _cpu_options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options
