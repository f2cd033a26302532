"""Text form of a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from exporters.compare.comparison import Comparison, Side
from exporters.inspect.show import chat_figure

_LABEL, _COLUMN = 16, 34


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Both models side by side, then how far apart they are."""
    a, b = comparison.a, comparison.b
    yield f"{comparison.tokens} tokens of {comparison.text}, in windows of {comparison.window}"
    yield _row("", "A", "B", "B / A")
    yield _row("model", a.model.path, b.model.path)
    yield _row("format", a.model.kind, b.model.kind)
    yield _row("runs on", a.model.engine, b.model.engine)
    yield _row("size", _size(a), _size(b), f"{b.model.bytes / max(a.model.bytes, 1):.2f}")
    ratio = f"{comparison.perplexity_ratio:.5f} +- {comparison.perplexity_ratio_error:.5f}"
    yield _row("perplexity", f"{a.perplexity:.4f}", f"{b.perplexity:.4f}", ratio)
    for label, ours, theirs in (
        ("prefill", a.prefill_tokens_per_s, b.prefill_tokens_per_s),
        ("decode", a.decode_tokens_per_s, b.decode_tokens_per_s),
    ):
        if ours is not None or theirs is not None:
            yield _row(label, _speed(ours), _speed(theirs), f"{theirs / ours:.2f}" if ours and theirs else "")
    yield (
        f"  {'KL divergence':<{_LABEL}}{comparison.kl_nats:.5f} nats a token of A's distribution from B's; "
        f"99 % of tokens at most {comparison.kl_99_nats:.4f}, all at most {comparison.kl_max_nats:.4f}"
    )
    yield f"  {'top-1 agreement':<{_LABEL}}{comparison.top1_agreement:.2%}"
    for record in comparison.chat:
        yield f"  {chat_figure(record)}"


def _row(label: str, a: str, b: str, ratio: str = "") -> str:
    cells = "".join(f"{_short(cell):<{_COLUMN}}" for cell in (a, b))
    return f"  {label:<{_LABEL}}{cells}{ratio}".rstrip()


def _short(text: str) -> str:
    """The end of a text that is too long for its column."""
    return text if len(text) < _COLUMN else f"...{text[4 - _COLUMN :]}"


def _size(side: Side) -> str:
    return f"{side.model.bytes / 1e6:,.1f} MB"


def _speed(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.1f} tokens/s"
