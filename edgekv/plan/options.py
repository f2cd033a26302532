"""Options of plans, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edgekv.errors import UsageError
from edgekv.option import Option, parse_numbers
from edgekv.spec.geometry import KeyLayout, KvDtype

HTP_CONTEXT_BYTES = 3_750_000_000
"""Capacity of one HTP context, observed, not documented: it addresses 4 GB, part of which the runtime needs."""

PROTOBUF_BYTES = (1 << 31) - 1
"""The largest protobuf, and so the largest file of one graph."""

MAX_CONTEXT = 1 << 20
"""The longest context that is planned: 1,048,576 tokens."""

MAX_GRAPHS = 16
"""Maximum number of ARs of one plan."""


DEFAULT_AR = (1, 32)
DEFAULT_CONTEXT = 512
DEFAULT_RECIPE = "w8a16"
DEFAULT_KV_DTYPE: KvDtype = "u8"
DEFAULT_KEY_LAYOUT: KeyLayout = "columns"
"""Of an export, and of its plan. NPUs read keys in columns faster."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Sizes given as options; None for an option that was not given.

    The recipe, which `recipe_weights` knows, is for a model that is not exported yet.
    """

    layers: Annotated[int | None, Option("Decoder layers.")] = None
    kv_heads: Annotated[int | None, Option("Key/value heads per layer.")] = None
    head_dim: Annotated[int | None, Option("Head dimension.")] = None
    context: Annotated[int | None, Option("Context length in tokens.")] = None
    kv_bits: Annotated[int | None, Option("Bits of a cache element: 8 or 16.")] = None
    ar: Annotated[
        tuple[int, ...] | None,
        Option(
            "Tokens per inference of each graph, comma-separated, with 1.",
            parse=parse_numbers,
            shown="1,32, or a bundle's own",
        ),
    ] = None
    recipe: str = DEFAULT_RECIPE

    def check(self) -> None:
        """Reject numbers out of range before anything is computed from them.

        Raises:
            UsageError: naming the option.
        """
        from edgekv.spec.config import LARGEST  # slow to import
        from edgekv.spec.described import LARGEST_HEADS

        bounds = {
            "layers": (1, LARGEST["num_hidden_layers"]),
            "kv_heads": (1, LARGEST["num_key_value_heads"]),
            "head_dim": (1, LARGEST["head_dim"]),
            "context": (2, MAX_CONTEXT),
        }
        for name, (minimum, maximum) in bounds.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value <= maximum:
                expected = f"{minimum} to {maximum}"
                raise UsageError(option(name), got=shortened(value), expected=expected, fix=f"Use {expected}.")
        if (heads := (self.layers or 1) * (self.kv_heads or 1)) > LARGEST_HEADS:
            expected = f"at most {LARGEST_HEADS} key/value heads in all layers together"
            raise UsageError("--layers and --kv-heads", got=heads, expected=expected, fix="Use smaller numbers.")
        if self.ar is not None and len(self.ar) > MAX_GRAPHS:
            expected = f"at most {MAX_GRAPHS} numbers"
            raise UsageError("--ar", got=f"{len(self.ar)} numbers", expected=expected, fix="Give fewer.")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The graphs of an export that is planned, and what a plan says of them.

    Attributes:
        context: S, tokens.
        recipe: one of `RECIPES`, or `front-BITS`, with the type of the head behind it if that is not int8.
        kv: `u8` or `s16`.
        ar: tokens per inference of each graph.
        acceptance: probability that a drafted token is right after right ones; None for no drafts.
        estimate: simulate the graphs too, which takes about a minute and needs the HTP compiler.
        checks: whether the export checks its graphs with the HTP compiler.
    """

    context: Annotated[int, Option("Context length in tokens.")] = DEFAULT_CONTEXT
    recipe: Annotated[str, Option("Integer types, such as w8a16, w4a16-lpbq64, front-5 or w4a16-head-int4.")] = (
        DEFAULT_RECIPE
    )
    kv: Annotated[str, Option("Integer type of the KV cache: u8, or s16 (HTP V73 and later).")] = DEFAULT_KV_DTYPE
    ar: Annotated[
        tuple[int, ...], Option("Tokens per inference of each graph, comma-separated, with 1.", parse=parse_numbers)
    ] = DEFAULT_AR
    acceptance: Annotated[
        float | None,
        Option("What speculation would bring if a drafted token is right with this probability, 0 to 1."),
    ] = None
    estimate: Annotated[
        bool, Option("Also simulate the graphs with the HTP compiler, of random weights: about a minute.")
    ] = False
    checks: Annotated[bool, Option("Plan an export with --skip-htp-check.", "--skip-htp-check", negates=True)] = True


def option(name: str) -> str:
    """`kv_heads` -> `--kv-heads`."""
    return "--" + name.replace("_", "-")


def shortened(value: object) -> str:
    """A value as text of at most 40 characters."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
