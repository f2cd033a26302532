"""Speed from a chip's bandwidth and operations alone, also with drafts."""

from __future__ import annotations

import msgspec

from devices import (
    FASTEST_PASS_S,
    PUBLISHED_SOURCE,
    Device,
    MeasuredSpeed,
    ReportError,
    measured_speed,
    nearest_published,
)
from edgekv.errors import BundleError, UsageError
from edgekv.machine.decoding import convert
from edgekv.plan.subject import Subject
from edgekv.spec import Decoder, Geometry, Weights

_SHORT_PROMPT = 128


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Time to first token, the prefill alone.

    Attributes:
        prompt_tokens: length of the prompt.
        passes: runs of the graph of the largest AR.
        low_s: seconds at the speed of the fastest published models.
        high_s: seconds at the speed of the slowest.
    """

    prompt_tokens: int
    passes: int
    low_s: float
    high_s: float


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A published speed of another model on the NPU.

    Attributes:
        model: its name in the source.
        precision: of its weights and activations.
        device: that was measured.
        soc: its chip.
        runtime: that ran it.
        context: S, tokens.
        prefill_tokens_per_s: None if it is not published.
        decode_tokens_per_s: of one sequence.
    """

    model: str
    precision: str
    device: str
    soc: str
    runtime: str
    context: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes read and arithmetic done, at the bandwidth of the device and at the speed of published models.

    Attributes:
        dram_gb_per_s: peak bandwidth of the device's DRAM, 10^9 bytes a second.
        reached_gb_per_s: bandwidth that published decoders reach, lowest and highest.
        measured_on: the chips of these publications.
        source: the publications.
        weights_bytes: bytes read per token: every layer and the head, one row of the embedding table.
        mean_cache_bytes: cache rows at the mean length of a generation that fills the context.
        full_cache_bytes: cache rows of a full context; a static graph always reads all of them.
        tokens_per_s: decode expected with one graph for the whole context, lowest and highest.
        roofline_tokens_per_s: at the peak bandwidth and the mean cache: an upper bound.
        static_roofline_tokens_per_s: at the peak bandwidth and the full cache.
        first_token: expected times to first token.
        published: the published model that is nearest in size, on this chip or the nearest one, by runtime.
        published_source: where they were published.
        evidence: `published`; or `measured on SM8750 (report NAME)`, if reports of conformance runs on the device give
            the bandwidth or the time of a pass.
        pass_s: time that a pass takes at least.
    """

    dram_gb_per_s: float
    reached_gb_per_s: tuple[float, float]
    measured_on: list[str]
    source: str
    weights_bytes: int
    mean_cache_bytes: int
    full_cache_bytes: int
    tokens_per_s: tuple[float, float]
    roofline_tokens_per_s: float
    static_roofline_tokens_per_s: float
    first_token: list[FirstToken]
    published: list[PublishedRow]
    published_source: str
    evidence: str
    pass_s: float


def find_measured(device: Device) -> MeasuredSpeed | None:
    """What reports of conformance runs say of a device; see `devices.measured_speed`.

    Raises:
        BundleError: a report is damaged or forged.
    """
    try:
        return measured_speed(device)
    except ReportError as error:
        fix = "Remove the file from devices/reports."
        raise BundleError(error.field, got=error.got, expected=error.expected, fix=fix) from None


def estimate_speed(subject: Subject, decoder: Decoder, weights: Weights, device: Device) -> Speed:
    """The speed of a model on a device.

    A pass of one token reads the weights and the whole cache, and takes at least the time of the fastest published
    pass. A pass of AR tokens adds the arithmetic of AR-1 more tokens. Host work, sampling and loading are not counted.
    Reports of the device itself replace published figures.

    Raises:
        BundleError: a report in `devices/reports` is damaged or forged.
    """
    geometry, ar = subject.geometry, subject.ar[-1]
    read_bytes = sum(weights.layer_bytes) + weights.head_bytes + weights.embedding_bytes // decoder.vocab
    full_bytes = sum(group.tensors * group.past_rows(1) * group.row_bytes for group in geometry.groups())
    mean_bytes = _mean_cache_bytes(geometry)
    measured = find_measured(device)
    peak, reached = device.dram_gb_per_s * 1e9, device.decode_gb_per_s
    if measured is not None and measured.gb_per_s is not None:
        reached = measured.gb_per_s
    pass_s = FASTEST_PASS_S if measured is None else measured.pass_s
    static_bytes = read_bytes + full_bytes
    macs = macs_per_token(decoder, geometry)
    rate = device.speed.tera_macs_per_s
    fast_s, slow_s = (max(static_bytes / (gb_per_s * 1e9), pass_s) for gb_per_s in (reached.high, reached.low))
    further_fast_s, further_slow_s = ((ar - 1) * macs / (tera_macs * 1e12) for tera_macs in (rate.high, rate.low))
    prompts = sorted({min(_SHORT_PROMPT, geometry.context - 1), geometry.context - 1})
    return Speed(
        dram_gb_per_s=device.dram_gb_per_s,
        reached_gb_per_s=(reached.low, reached.high),
        measured_on=list(device.speed.measured_on),
        source=device.speed.source,
        weights_bytes=read_bytes,
        mean_cache_bytes=mean_bytes,
        full_cache_bytes=full_bytes,
        tokens_per_s=(1 / slow_s, 1 / fast_s),
        roofline_tokens_per_s=peak / (read_bytes + mean_bytes),
        static_roofline_tokens_per_s=peak / static_bytes,
        first_token=[
            FirstToken(
                prompt_tokens=tokens,
                passes=passes,
                low_s=passes * (fast_s + further_fast_s),
                high_s=passes * (slow_s + further_slow_s),
            )
            for tokens in prompts
            for passes in [-(-tokens // ar)]
        ],
        published=[
            convert(row, PublishedRow, from_attributes=True)
            for row in nearest_published(decoder.parameters, geometry.context, device)
        ],
        published_source=PUBLISHED_SOURCE,
        evidence="published" if measured is None else measured.evidence,
        pass_s=pass_s,
    )


def macs_per_token(decoder: Decoder, geometry: Geometry) -> int:
    """Multiply-adds of one more token in a pass: every layer's matrices, and its attention or convolution.

    The head runs once a pass, not once a token.
    """
    attending = geometry.rows()
    owners = sum(group.layers for group in attending)
    readers = sum(kind.layers for kind in decoder.layer_kinds if any(matrix.role == "q" for matrix in kind.matrices))
    # Layers that read the cache of another are taken to be of all kinds alike.
    attention = sum(
        readers * group.layers * group.window * 2 * decoder.heads * group.head_dim // owners for group in attending
    )
    states = (group for group in geometry.groups() if group not in attending)
    return (
        decoder.all_layer_parameters + attention + sum(group.layers * group.read_rows * group.width for group in states)
    )


def _mean_cache_bytes(geometry: Geometry) -> int:
    """Rows held on average while the context fills: min(t, W-1) over the first S-1 tokens."""
    tokens = geometry.context - 1
    total = 0
    for group in geometry.groups():
        rows = group.past_rows(1)
        total += group.tensors * group.row_bytes * rows * (2 * tokens - rows) // (2 * tokens)
    return total


VERIFY_ROWS = (4, 8, 16)


class SpeculativeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Decode with a verify graph.

    Attributes:
        rows: AR of the graph: one known token and drafts.
        tokens_per_pass: expected tokens of a pass.
        cost: of a pass, in passes of one row, lowest and highest.
        tokens_per_s: expected, lowest and highest.
        gain: times as many tokens a second as without drafts, lowest and highest.
    """

    rows: int
    tokens_per_pass: float
    cost: tuple[float, float]
    tokens_per_s: tuple[float, float]
    gain: tuple[float, float]


def check_acceptance(acceptance: float) -> None:
    """Refuse what is no probability.

    Raises:
        UsageError: not from 0 to 1.
    """
    if not 0 <= acceptance <= 1:
        fix = "Use 0.6, or what a generation's statistics say."
        raise UsageError("--acceptance", got=acceptance, expected="0 to 1", fix=fix)


def speculative_speed(
    subject: Subject, decoder: Decoder, device: Device, speed: Speed, acceptance: float
) -> list[SpeculativeSpeed]:
    """The speed with verify graphs of `VERIFY_ROWS` rows.

    A pass of R rows brings (1 - p^R) / (1 - p) tokens if each draft after right ones is right with probability p
    (Leviathan et al., 2023, equation 1). It reads what a step reads, and adds the arithmetic of R-1 more tokens, each
    with its logits. Drafting is not counted.

    Args:
        speed: see `estimate_speed`.
        acceptance: p.
    """
    macs = macs_per_token(decoder, subject.geometry) + decoder.head_parameters
    rate = device.speed.tera_macs_per_s
    low, high = speed.tokens_per_s
    speeds = []
    for rows in VERIFY_ROWS:
        tokens = sum(acceptance**n for n in range(rows))
        costs = [
            1 + (rows - 1) * macs / (tera_macs * 1e12) * steps
            for tera_macs, steps in ((rate.high, high), (rate.low, low))
        ]
        rates = [tokens * steps / cost for steps, cost in ((high, costs[0]), (low, costs[1]))]
        gains = [tokens / cost for cost in costs]
        speeds.append(
            SpeculativeSpeed(
                rows=rows,
                tokens_per_pass=tokens,
                cost=(min(costs), max(costs)),
                tokens_per_s=(min(rates), max(rates)),
                gain=(min(gains), max(gains)),
            )
        )
    return speeds
