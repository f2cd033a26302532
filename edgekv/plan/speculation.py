"""What speculation would bring on a device, for a given acceptance."""

from __future__ import annotations

import msgspec

from devices import Device
from edgekv.errors import UsageError
from edgekv.plan.speed import Speed, macs_per_token
from edgekv.plan.subject import Subject
from edgekv.spec import Decoder

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
        subject: the model.
        decoder: its matrices.
        device: the target.
        speed: see `estimate_speed`.
        acceptance: p.
    """
    macs = macs_per_token(decoder, subject.geometry) + decoder.hidden * decoder.vocab
    rate = device.speed.tera_macs_per_s
    low, high = speed.tokens_per_s
    found = []
    for rows in VERIFY_ROWS:
        tokens = sum(acceptance**n for n in range(rows))
        costs = [1 + (rows - 1) * macs / (each * 1e12) * steps for each, steps in ((rate.high, high), (rate.low, low))]
        rates = [tokens * steps / cost for steps, cost in ((high, costs[0]), (low, costs[1]))]
        gains = [tokens / cost for cost in costs]
        found.append(
            SpeculativeSpeed(
                rows=rows,
                tokens_per_pass=tokens,
                cost=(min(costs), max(costs)),
                tokens_per_s=(min(rates), max(rates)),
                gain=(min(gains), max(gains)),
            )
        )
    return found
