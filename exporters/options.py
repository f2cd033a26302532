"""Options of an export."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from devices import Device, find
from edgekv.bundle.formats import GraphFormat
from edgekv.errors import UsageError
from edgekv.machine.system import parse_bytes
from edgekv.option import Option, OptionGroup, check_place, find_device, parse_numbers, parse_sizes
from edgekv.plan.options import DEFAULT_AR, DEFAULT_CONTEXT, DEFAULT_KEY_LAYOUT, DEFAULT_RECIPE
from edgekv.spec.geometry import KeyLayout, KvDtype
from exporters.graphs.places import EmbeddingPlace, HeadPlace
from exporters.lora.options import LoraOptions
from exporters.quantize.effort import DEFAULT_EFFORT, Effort
from exporters.quantize.sink_request import SinkRequest

if TYPE_CHECKING:
    from exporters.quantize.recipe import Recipe

KV_DTYPES: dict[GraphFormat, tuple[KvDtype, ...]] = {"onnx": ("u8", "s16"), "tflite": ("s8", "s16")}
"""Integer types of the cache for each format; the first is the default."""


LOCAL = "local"
"""The scheduler that stands for processes on this machine."""

ANY_CHIP = "SM8650"
"""What an export for no chip in particular is checked against: the integers of all chips from V73 on are the same."""
STORED_RECIPE = "as-stored"
"""The default for a quantized checkpoint."""

ALLOCATED_RECIPE = "w4a16"
"""The default with a goal such as `--target-mb`: its types are replaced."""

_UNNAMED = ""
"""The name of a recipe that nobody chose."""

_DRAFT_ROWS = (8, 16)
_EXAMPLES = {"--target-mb": 100, "--max-kl": 0.05, "--target-tokens-per-s": 100}
_GRAPHS, _QUANTIZATION, _CHECK = "Graphs", "Quantization", "Checks"
"""Headings in the help."""
_TFLITE_SPLITS = [*product((None, 1), (None, "graph", "host"), (None, "last"))]


def read_recipe(name: str) -> Recipe:
    """`find_recipe`, imported when it is called: its module takes a while, and `--help` needs none of it."""
    from exporters.quantize.recipe import find_recipe

    return find_recipe(name)


def _unnamed_recipe() -> Recipe:
    import msgspec

    return msgspec.structs.replace(read_recipe(DEFAULT_RECIPE), name=_UNNAMED)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options that determine the bundle.

    Contexts are multiples of the largest AR; graphs of several share the weights and one cache. Slots for adapters at
    run time are made with `lora`.
    """

    device: Annotated[
        Device,
        Option(
            "Target chip: part number or name, such as SM8650; see `edgekv devices`. Without one the bundle is for the "
            "CPU, and edgekv compile takes the chip.",
            parse=find_device,
            shown="",
        ),
    ] = field(default_factory=lambda: find(ANY_CHIP))
    recipe: Annotated[
        Recipe,
        Option(
            "Integer types: w8a16, w4a16, w4a16-lpbq32, -lpbq64, -lpbq128, -lpbq32-updown8, -uplpbq64-down8, "
            "as-stored, front-N (4 or 8 bits per matrix, N on average, chosen to minimize KL, such as front-5), or a "
            "recipe file (.json). "
            "A name may end with the type of the head, such as w4a16-head-int4.",
            parse=lambda _, name: read_recipe(name),
            shown=f"{DEFAULT_RECIPE}; {STORED_RECIPE} for a quantized checkpoint; {ALLOCATED_RECIPE} with a target",
            group=_QUANTIZATION,
        ),
    ] = field(default_factory=_unnamed_recipe)
    context: Annotated[
        int | Sequence[int],
        Option(
            "Context length S in tokens; several are comma-separated, such as 512,1024,4096.",
            parse=parse_numbers,
            group=_GRAPHS,
        ),
    ] = DEFAULT_CONTEXT
    ar: Annotated[
        Sequence[int],
        Option("Tokens per inference (AR) of each graph, comma-separated, with 1.", parse=parse_numbers, group=_GRAPHS),
    ] = DEFAULT_AR
    draft_rows: Annotated[
        Sequence[int] | None,
        Option(
            "Tokens per inference of graphs that verify drafts for --speculate and return the logits of every token, "
            "2 to the largest AR, comma-separated, such as 8,16.",
            parse=parse_numbers,
            shown="none; 8,16 up to the largest AR with --give-hidden",
            group=_GRAPHS,
        ),
    ] = None
    give_hidden: Annotated[
        bool,
        Option("Let graphs also return the last hidden states, which drafters for this model read.", group=_GRAPHS),
    ] = False
    max_attention_window: Annotated[
        Sequence[int],
        Option(
            "Attention window of each layer in tokens, including the query, comma-separated; a shorter list repeats.",
            parse=parse_numbers,
            shown="the model's own",
            group=_GRAPHS,
        ),
    ] = ()
    kv_dtype: Annotated[
        KvDtype | None,
        Option(
            "Integer type of the KV cache: u8, or s16 (HTP V73 and later).",
            "--kv",
            metavar="TYPE",
            shown="u8; s8 with --format tflite",
            group=_GRAPHS,
        ),
    ] = None
    state_bits: Annotated[int, Option("Bits per element of convolution states: 8 or 16.", group=_GRAPHS)] = 16
    key_layout: Annotated[
        KeyLayout | None,
        Option(
            "Key layout: rows [S, D], or columns [D, S], which NPUs read faster.",
            shown=f"{DEFAULT_KEY_LAYOUT}; rows with graphs that verify drafts and with --format tflite",
            group=_GRAPHS,
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        Option("UTF-8 calibration text.", shown="the checkpoint's or edgekv's own", group=_QUANTIZATION),
    ] = None
    calibration_pictures: Annotated[
        Path | None,
        Option(
            "Folder of up to 64 pictures to calibrate the vision encoder.",
            shown="synthetic pictures",
            group=_QUANTIZATION,
        ),
    ] = None
    picture_sizes: Annotated[
        Sequence[tuple[int, int]],
        Option(
            "Sizes in pixels that pictures are shown in, such as 448x448,896x448: each gets the nearest. For models "
            "that read whole pictures, such as Qwen3-VL.",
            metavar="WxH",
            parse=parse_sizes,
            shown="any of at most 512 x 512 pixels",
            group=_GRAPHS,
        ),
    ] = ()
    calibration_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of calibration tokens.",
            shown="12800; 4096 for 500 M parameters or more; 2048 with --effort 0",
            group=_QUANTIZATION,
        ),
    ] = None
    effort: Annotated[
        Effort,
        Option(
            "Effort of rounding weights, 0 to 5. 0: to nearest, for a first try. 1: GPTQ. 2: then coordinate descent "
            "on 4-bit matrices. 3 and above: also on 8-bit ones, q_proj and k_proj weighted by their effect on "
            "attention, and calibration on text that the float model generates.",
            metavar="0..5",
            parse=Effort.parse,
            shown=str(DEFAULT_EFFORT.level),
            group=_QUANTIZATION,
        ),
    ] = DEFAULT_EFFORT
    target_mb: Annotated[
        float | None,
        Option(
            "Bundle of at most N MB with the lowest KL divergence: 4 or 8 bits per matrix of the layers and of an "
            "untied head; transforms and methods are those of --recipe.",
            metavar="N",
            shown="off",
            group=_QUANTIZATION,
        ),
    ] = None
    max_kl: Annotated[
        float | None,
        Option(
            "Smallest bundle whose measured KL divergence from the float model is at most X nats per token. With "
            "--target-mb, an upper bound on the result.",
            metavar="X",
            shown="off",
            group=_QUANTIZATION,
        ),
    ] = None
    target_tokens_per_s: Annotated[
        float | None,
        Option(
            "Choose integer types that decode at least N tokens per second at the largest context, simulated by the "
            "HTP compiler; alone, or with --target-mb or --max-kl.",
            metavar="N",
            shown="off",
            group=_QUANTIZATION,
        ),
    ] = None
    allow_float: Annotated[bool, Option("Accept and record nodes that compute in float.", group=_CHECK)] = False
    check_on_htp: Annotated[
        bool,
        Option(
            "Skip the HTP compiler's check for float nodes; the manifest records it.",
            "--skip-htp-check",
            negates=True,
            group=_CHECK,
        ),
    ] = True
    check_quality: Annotated[
        bool,
        Option(
            "Skip the measurement at the end: the bundle against the float model, on 512 tokens of prose and 256 of "
            "chat.",
            "--no-quality-check",
            negates=True,
            group=_CHECK,
        ),
    ] = True
    compile: Annotated[bool, Option("Also write context binaries, in the same compiler run.", group=_CHECK)] = False
    graph_format: Annotated[
        GraphFormat,
        Option("Graph format; tflite is for LiteRT and tflite-runtime.", "--format", group=_GRAPHS),
    ] = "onnx"
    splits: Annotated[
        int | None,
        Option(
            "Number of parts to split the layers into.",
            shown="1, or as many as the size limits require",
            group=_GRAPHS,
        ),
    ] = None
    embedding: Annotated[
        EmbeddingPlace | None,
        Option(
            "Where embeddings are looked up: in the graph, or in a memory-mapped table of the host.",
            shown="graph; host with parts",
            group=_GRAPHS,
        ),
    ] = None
    head: Annotated[
        HeadPlace | None,
        Option(
            "Where lm_head is: in a part of its own that all graphs share, or in the last part.",
            shown="last; own with parts",
            group=_GRAPHS,
        ),
    ] = None
    sink: Annotated[
        SinkRequest,
        Option(
            "Tokens at position 0 whose keys and values are stored in float precision and never computed by the "
            "graphs: auto (BOS, if its outliers would set the ranges), none, or token ids.",
            metavar="auto|none|IDS",
            parse=lambda _, text: SinkRequest.parse(text),
            shown="auto",
            group=_QUANTIZATION,
        ),
    ] = field(default_factory=SinkRequest)
    lora: Annotated[LoraOptions | None, OptionGroup("Slots for adapters")] = None

    def __post_init__(self) -> None:
        from quant import WEIGHT_TYPES  # slow to import

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
        if wrong := [rows for rows in self.verify_rows if not 1 < rows <= largest]:
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
        self._check_goal()
        if self.cache_dtype not in KV_DTYPES[self.graph_format]:
            kinds = " or ".join(KV_DTYPES[self.graph_format])
            raise UsageError(
                "--kv",
                got=f"{self.cache_dtype} with --format {self.graph_format}",
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
        if self.graph_format == "tflite" and self.cache_layout != "rows":
            raise UsageError(
                "--key-layout",
                got=f"{self.cache_layout} with --format tflite",
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
        if self.allow_float and (self.graph_format == "tflite" or not self.check_on_htp):
            raise UsageError(
                "--allow-float",
                got="--format tflite" if self.graph_format == "tflite" else "--skip-htp-check",
                expected="the HTP compiler's check, which finds such nodes",
                fix="Leave it out.",
            )
        if self.graph_format == "tflite" and (self.splits, self.embedding, self.head) not in _TFLITE_SPLITS:
            raise UsageError(
                "--splits, --embedding, --head",
                got=", ".join(str(choice) for choice in (self.splits, self.embedding, self.head) if choice is not None),
                expected="one part for each graph with --format tflite",
                fix="Leave them out, or use --format onnx.",
            )
        if not self.device.supports_kv(self.cache_dtype):
            raise UsageError(
                "--kv",
                got=f"{self.cache_dtype} for {self.device.soc} (V{self.device.arch})",
                expected="V73 or later for a 16-bit cache",
                fix=f"Use --kv {KV_DTYPES[self.graph_format][0]}, or a later device.",
            )

    def for_checkpoint(self, *, is_quantized: bool) -> ExportOptions:
        """With the default recipe for a checkpoint, unless one was named."""
        if self.recipe.name != _UNNAMED:
            return self
        usual = STORED_RECIPE if is_quantized else DEFAULT_RECIPE
        return replace(self, recipe=read_recipe(ALLOCATED_RECIPE if self.allocates else usual))

    @property
    def cache_dtype(self) -> KvDtype:
        """Integer type of keys and values."""
        return self.kv_dtype or KV_DTYPES[self.graph_format][0]

    @property
    def cache_layout(self) -> KeyLayout:
        """How keys lie in the cache.

        LiteRT's graphs read rows, and where drafts are verified, graphs of several AR alternate: each has another
        stride of columns.
        """
        needs_rows = self.graph_format == "tflite" or self.verify_rows
        return self.key_layout or ("rows" if needs_rows else DEFAULT_KEY_LAYOUT)

    @property
    def verify_rows(self) -> tuple[int, ...]:
        """AR of the graphs that verify drafts: on an NPU 8 rows cost little more than one, 16 a third more."""
        if self.draft_rows is not None or not self.give_hidden:
            return tuple(self.draft_rows or ())
        largest = max(self.ar)
        return tuple(rows for rows in _DRAFT_ROWS if rows <= largest) or (largest,)

    @property
    def allocates(self) -> bool:
        """Whether the export chooses the types of matrices."""
        return self.recipe.mean_bits is not None or any(value is not None for value in self._goals.values())

    @property
    def _goals(self) -> dict[str, float | None]:
        """The limits of a choice of types, by option."""
        return {
            "--target-mb": self.target_mb,
            "--max-kl": self.max_kl,
            "--target-tokens-per-s": self.target_tokens_per_s,
        }

    def _check_goal(self) -> None:
        goals = {option: value for option, value in self._goals.items() if value is not None}
        if len(goals) > 2:
            fix = "Leave one out: what follows from the two others is measured."
            raise UsageError(", ".join(goals), got="all of them", expected="one or two of them", fix=fix)
        if self.recipe.mean_bits is not None and goals:
            raise UsageError(
                ", ".join(goals),
                got=f"it with the recipe {self.recipe.name}, which says how many bits weights have",
                expected="one goal",
                fix=f"Leave it out, or use --recipe {ALLOCATED_RECIPE}.",
            )
        for option, value in goals.items():
            if not 0 < value < math.inf:
                fix = f"Use {option} {_EXAMPLES[option]}."
                raise UsageError(option, got=value, expected="a number above 0", fix=fix)
        if self.target_tokens_per_s is not None and self.graph_format != "onnx":
            raise UsageError(
                "--target-tokens-per-s",
                got=f"--format {self.graph_format}",
                expected="ONNX graphs, which the HTP compiler simulates",
                fix="Leave one of them out.",
            )
        if self.max_kl is not None and not self.check_quality:
            raise UsageError(
                "--max-kl",
                got="--no-quality-check",
                expected="the measurement at the end",
                fix="Leave that option out.",
            )
        if self.allocates and (self.recipe.keep_stored or any(rule.method == "stored" for rule in self.recipe.weights)):
            raise UsageError(
                ", ".join([*self._goals, "mean_bits"]),
                got=f"the recipe {self.recipe.name}, which keeps stored integers",
                expected="a recipe that rounds",
                fix=f"Use --recipe {ALLOCATED_RECIPE}.",
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
        say: called with what happens to workers.
    """

    scheduler: Annotated[
        str,
        Option("Run the work on workers: local for processes on this machine, or a Dask scheduler, tcp://HOST:PORT."),
    ]
    workers: Annotated[
        int | None, Option("Local processes.", minimum=1, shown="one per core, as far as RAM allows")
    ] = None
    keep_going: Annotated[bool, Option("Skip invalid or failed combinations, and unsuitable workers.")] = False
    say: Callable[[str], None] = field(default=print)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options that do not change the bundle."""

    max_ram_bytes: Annotated[
        int | None,
        Option(
            "RAM limit for edgekv, such as 4GB; the HTP compiler's RAM is not included.", "--max-ram", parse=parse_bytes
        ),
    ] = None
    cache_dir: Annotated[
        Path | None,
        Option("Cache directory for finished pieces.", shown="EDGEKV_CACHE_DIR, or the user's cache directory"),
    ] = None
    store: Annotated[
        str | None,
        Option(
            "Shared folder or fsspec URL of finished pieces, readable by all workers; never cleared.",
            parse=check_place,
            shown="pieces in the cache directory",
        ),
    ] = None
    resume: Annotated[bool, Option("Reuse finished pieces of an interrupted run; always on with --scheduler.")] = False
    keep_pieces: Annotated[
        bool,
        Option("Keep finished pieces, so that --resume with another recipe reuses unchanged ones."),
    ] = False
    cluster: Annotated[Cluster | None, OptionGroup("Run")] = None

    @property
    def removes_pieces(self) -> bool:
        """Whether pieces are removed when what they are for is complete."""
        return self.store is None and not self.keep_pieces


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(n) for n in numbers)
