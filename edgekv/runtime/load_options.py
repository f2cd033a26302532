"""How a bundle is run: the options of `edgekv.load`, and of every command that loads a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from edgekv.errors import UsageError
from edgekv.option import Option
from edgekv.qnn.options import HtpOptions

if TYPE_CHECKING:
    from edgekv.kv import Policy

OnFull = Literal["drop-oldest", "stop"]
"""`drop-oldest` leaves the oldest turns out of the prompt; `stop` refuses a prompt that is longer than the context."""
OnFullOption = Annotated[
    OnFull, Option("When a conversation fills the context: drop its oldest turns, or refuse further messages.")
]


def check_on_full(text: str, field: str = "on_full") -> OnFull:
    """The value of an option.

    Raises:
        UsageError: another value.
    """
    for name in get_args(OnFull):
        if text == name:
            return text  # type: ignore[return-value]
    expected = " or ".join(get_args(OnFull))
    raise UsageError(field, got=repr(text), expected=expected, fix="Leave it out to drop the oldest turns.")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What computes, and how. None leaves a choice to the engine."""

    engine: Annotated[
        str, Option("Where the graphs run: cpu or htp for a bundle of ONNX graphs, litert or tflite for TFLite graphs.")
    ] = "cpu"
    threads: Annotated[int | None, Option("Threads of one operation on a CPU.", shown="all cores")] = None
    cpu_mode: Annotated[
        str | None,
        Option(
            "How the engine cpu computes: emulate rounds every result as the HTP does; exact16 multiplies the weights "
            "by 16-bit activations, fast by 8-bit ones.",
            shown="fast to generate, emulate to compare",
        ),
    ] = None
    expert_budget: Annotated[
        str | int | None,
        Option(
            "Memory for experts (MoE) that are kept between passes, such as 512MiB, in the modes fast and exact16; "
            "others are read from files when a pass needs them.",
            shown="as much as is free",
            subjects=("expert budget",),
        ),
    ] = None
    htp: Annotated[
        HtpOptions | None,
        Option(
            "Options of the engine htp, KEY=VALUE,...: performance (burst, balanced, power_saver, ...), rpc-latency "
            "in us, priority (low to high), vtcm in MiB, optimization (1 to 3), device (its number), shared-memory "
            "(yes, no or auto) and mapped-weights (yes or no).",
            metavar="OPTIONS",
            parse=lambda _, text: HtpOptions.parse(text),
            subjects=("htp",),
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How keys and values are kept."""

    kv_update: Annotated[
        str | None,
        Option(
            "KV cache update strategy: pointer-shift, slot, mirror or shift-concat; `edgekv size` compares them.",
            shown="slot; pointer-shift with --reserve",
            subjects=("update strategy",),
        ),
    ] = None
    reserve: Annotated[
        Fraction | float | str | None,
        Option(
            "Buffer of pointer-shift in units of S-1 rows per tensor, above 1, at most 2; a larger one slides less.",
            shown="2",
        ),
    ] = None
    policy: Annotated[
        str | Policy,
        Option(
            "When the context is full: fail ends the text; sliding-window drops the oldest tokens; sinks(N, WINDOW) "
            "keeps the first N and the newest WINDOW, at positions within the context; keydiff(BUDGET) or "
            "keydiff(BUDGET, RECENT) keeps the BUDGET tokens whose keys are least similar to the mean key, the RECENT "
            "newest (an eighth) among them.",
            "--context-policy",
            subjects=("context policy",),
        ),
    ] = "fail"
    cache_mode: Annotated[
        str | Any,  # a `CacheMode` of edgekv.engine
        Option(
            "What is kept from step to step: always, long-sequence-only(TOKENS), adaptive, adaptive(64MiB), "
            "adaptive(25%), or disabled, which computes the whole sequence again for every token.",
            subjects=("cache mode", "memory budget"),
        ),
    ] = "always"
    kv_growth: Annotated[
        str | None,
        Option(
            "For a bundle with several contexts, with slot or pointer-shift: cache memory starts at the smallest and "
            "grows when it is outgrown, staggered (layer by layer) or together.",
            shown="all memory at once",
            subjects=("growth",),
        ),
    ] = None
    reproducible: Annotated[
        bool,
        Option("Make output independent of cache state. On a CPU, only whole prefill windows are reused."),
    ] = False
