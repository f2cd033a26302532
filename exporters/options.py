"""Options of an export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from devices import Device
from edgekv.bundle import GraphFormat
from edgekv.errors import UsageError
from edgekv.kv import KeyLayout, KvDtype
from exporters.graphs.split import EmbeddingPlace, HeadPlace
from exporters.lora.options import LoraOptions
from exporters.quantize.recipe import Recipe
from exporters.quantize.sink import SinkWanted
from quant import WEIGHT_TYPES

KV_DTYPES: dict[GraphFormat, tuple[KvDtype, ...]] = {"onnx": ("u8", "s16"), "tflite": ("s8", "s16")}
"""Integer types of the cache for each format; the first is the default."""

LOCAL = "local"
"""The scheduler that stands for processes on this machine."""

_TFLITE_SPLITS = [*product((None, 1), (None, "graph"), (None, "last"))]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options that determine the bundle.

    Attributes:
        device: the target chip.
        recipe: integer types of weights and activations.
        context: context length S in tokens, a multiple of the largest AR; several share the weights and one cache.
        ar: tokens per inference of each graph; must include 1.
        draft_rows: tokens per inference of graphs that verify drafts, which return the logits of every token; 2 to the
            largest AR.
        max_attention_window: attention window limit of each layer in tokens, including the query; a shorter list is
            repeated. Empty for the model's own windows.
        kv_dtype: integer type of the cache.
        state_bits: of each element of the states of convolutions, 8 or 16.
        key_layout: keys as `rows` [S, D] or `columns` [D, S]; see `edgekv.kv.Geometry`.
        calibration: a text file; None for edgekv's own text.
        calibration_tokens: the most tokens to use; None for `edgekv.plan.default_calibration_tokens`.
        learn_tokens: tokens that the float model writes itself, on which the rounding of weights is learned beside the
            calibration text; 0 for the recipe's own methods on that text alone.
        allow_float: accept nodes that compute in float, and record them.
        check_on_htp: compile every graph and look for float nodes; ONNX graphs only.
        compile: also write context binaries, in the same compiler run as the float check; ONNX graphs only.
        graph_format: ONNX graphs, or one `.tflite` file.
        splits: number of parts; None for as few as the size limits allow.
        embedding: where embeddings are looked up, `graph` or `host`; None for `graph`, or `host` with parts.
        sink: whether the token at position 0 is kept out of the graphs; see `exporters.quantize.sink`.
        head: `own` for lm_head as a separate part, `last` for lm_head in the last part; None for `last`, or `own` with
            parts.
        lora: slots for adapters at run time; None for none.
    """

    device: Device
    recipe: Recipe
    context: int | Sequence[int] = 512
    ar: Sequence[int] = (1, 32)
    draft_rows: Sequence[int] = ()
    max_attention_window: Sequence[int] = ()
    kv_dtype: KvDtype = "u8"
    state_bits: int = 16
    key_layout: KeyLayout = "rows"
    calibration: Path | None = None
    calibration_tokens: int | None = None
    learn_tokens: int = 0
    allow_float: bool = False
    check_on_htp: bool = True
    compile: bool = False
    graph_format: GraphFormat = "onnx"
    splits: int | None = None
    embedding: EmbeddingPlace | None = None
    head: HeadPlace | None = None
    sink: SinkWanted = field(default_factory=SinkWanted)
    lora: LoraOptions | None = None

    def __post_init__(self) -> None:
        if self.lora is not None:
            self.lora.check(self.device, self.graph_format, self.recipe)
        if 1 not in self.ar or min(self.ar) < 1:
            raise UsageError(
                "--ar",
                got=_listed(self.ar),
                expected="1 and larger numbers, such as 1,32",
                fix="Add 1: it decodes.",
            )
        if not self.contexts:
            raise UsageError("--context", got="no number", expected="one at least", fix="Use --context 512.")
        largest = max(self.ar)
        for context in self.contexts:
            if context % largest or context <= largest:
                raise UsageError(
                    "--context",
                    got=context,
                    expected=f"a multiple of the largest AR, {largest}, above it",
                    fix=f"Use {max(2, round(context / largest)) * largest}, or another --ar.",
                )
        if wrong := [rows for rows in self.draft_rows if not 1 < rows <= largest]:
            raise UsageError(
                "--draft-rows",
                got=wrong[0],
                expected=f"2 to {largest}, the largest --ar",
                fix="Use --draft-rows 8.",
            )
        if self.calibration_tokens is not None and self.calibration_tokens < 2:
            raise UsageError(
                "--calibration-tokens",
                got=self.calibration_tokens,
                expected="at least 2",
                fix="Use --calibration-tokens 4096.",
            )
        if self.learn_tokens < 0:
            raise UsageError(
                "--learn-rounding",
                got=self.learn_tokens,
                expected="a number of tokens",
                fix="Use --learn-rounding 32768, or leave it out.",
            )
        if self.kv_dtype not in KV_DTYPES[self.graph_format]:
            kinds = " or ".join(KV_DTYPES[self.graph_format])
            raise UsageError(
                "--kv",
                got=f"{self.kv_dtype} with --format {self.graph_format}",
                expected=f"{kinds}, which its kernels multiply by",
                fix=f"Use --kv {KV_DTYPES[self.graph_format][0]}.",
            )
        if self.state_bits not in (8, 16):
            raise UsageError("--state-bits", got=self.state_bits, expected="8 or 16", fix="Use --state-bits 16.")
        if self.graph_format == "tflite" and any(
            "litert" not in WEIGHT_TYPES[rule.dtype].engines for rule in self.recipe.weights
        ):
            raise UsageError(
                "--recipe",
                got=f"{self.recipe.name}, with a scale for each block, with --format tflite",
                expected="a scale for each output channel, which its kernels multiply int16 by",
                fix="Use --recipe w8a16 or w4a16, or --format onnx.",
            )
        if self.graph_format == "tflite" and self.key_layout != "rows":
            raise UsageError(
                "--key-layout",
                got=f"{self.key_layout} with --format tflite",
                expected="rows",
                fix="Leave it out, or use --format onnx.",
            )
        if self.compile and (self.graph_format == "tflite" or not self.check_on_htp):
            raise UsageError(
                "--compile",
                got="--format tflite" if self.graph_format == "tflite" else "--skip-htp-check",
                expected="ONNX graphs, which are checked and compiled at once",
                fix="Leave it out, and run edgekv compile on the bundle.",
            )
        if self.graph_format == "tflite" and (self.splits, self.embedding, self.head) not in _TFLITE_SPLITS:
            raise UsageError(
                "--splits, --embedding, --head",
                got=", ".join(str(each) for each in (self.splits, self.embedding, self.head) if each is not None),
                expected="graphs that are whole with --format tflite",
                fix="Leave them out, or use --format onnx.",
            )
        if not self.device.supports_kv(self.kv_dtype):
            raise UsageError(
                "--kv",
                got=f"{self.kv_dtype} for {self.device.soc} (V{self.device.arch})",
                expected="V73 or later for a 16-bit cache",
                fix=f"Use --kv {KV_DTYPES[self.graph_format][0]}, or a later device.",
            )

    @property
    def state_dtype(self) -> KvDtype:
        """Integer type of the states of convolutions."""
        is_tflite = self.graph_format == "tflite"  # its activations are signed
        return ("s16" if is_tflite else "u16") if self.state_bits == 16 else ("s8" if is_tflite else "u8")

    @property
    def contexts(self) -> tuple[int, ...]:
        """S of the graphs, each once, ascending."""
        return tuple(sorted({self.context} if isinstance(self.context, int) else set(self.context)))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where pieces run.

    Attributes:
        scheduler: `local` for processes on this machine, or a Dask scheduler's address.
        workers: number of local processes; None for one per core, as far as RAM allows.
        keep_going: go on when a piece fails, and without workers that do not fit.
        say: called with what happens to workers.
        divide: make the matrices of a layer pieces of their own.
    """

    scheduler: str = LOCAL
    workers: int | None = None
    keep_going: bool = False
    say: Callable[[str], None] = field(default=print)
    divide: bool = False


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options that do not change the bundle.

    Attributes:
        max_ram_bytes: RAM limit of this process, or None; the HTP compiler's processes are not included.
        cache_dir: where finished pieces are kept; None for EDGEKV_CACHE_DIR or the user's cache directory.
        store: a folder or fsspec URL for finished pieces instead; they stay there.
        resume: take finished pieces; on a cluster they always are.
        keep_stages: keep finished pieces in the cache directory afterwards, for other recipes.
        cluster: where pieces are done; None for this process.
    """

    max_ram_bytes: int | None = None
    cache_dir: Path | None = None
    store: str | None = None
    resume: bool = False
    keep_stages: bool = False
    cluster: Cluster | None = None

    @property
    def removes_pieces(self) -> bool:
        """Whether pieces are removed when what they are for is complete."""
        return self.store is None and not self.keep_stages


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(n) for n in numbers)
