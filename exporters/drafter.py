"""A drafter's checkpoint, the bundle of its target, and what the one reads of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import (
    Bundle,
    GraphRecord,
    RecipeRecord,
)
from edgekv.errors import UsageError
from edgekv.graphs.decoder import last_norm
from edgekv.kv import KvTensor
from edgekv.machine.graph_file import GRAPH_SUFFIX
from edgekv.plan import DEFAULT_RECIPE
from edgekv.spec import (
    FINAL_NORM,
    DecoderSpec,
    PartRecord,
    Role,
)
from exporters.checkpoint.aligned import AlignedHeads
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import heads_of, transformed_as
from exporters.checkpoint.rotate import ResidualRotation
from exporters.inspect.evaluate import open_source
from exporters.options import ExportOptions
from exporters.quantize.reference import Floats, NumpyOps, Reference, Weights

_READ = (
    "device",
    "recipe",
    "effort",
    "calibration",
    "calibration_tokens",
    "allow_float",
    "check_on_htp",
    "check_quality",
)
_TARGETS_OWN = ("context", "ar", "kv_dtype", "state_bits", "key_layout", "max_attention_window", "sink")


@dataclass(frozen=True, slots=True)
class TargetText:
    """What a drafter reads of its target on a calibration text.

    Attributes:
        tokens: the token of each row, which follows the ones that the target has run, `[windows, T]`.
        hidden: the target's last hidden states before it, `[windows, T, H]`, as its graphs give them.
        rows: the target's keys and values up to there, `[windows, T, D]`, as its cache holds them.
    """

    tokens: NDArray[np.int64]
    hidden: Floats
    rows: Mapping[KvTensor, Floats]

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        arrays: dict[str, NDArray[Any]] = {"tokens": self.tokens, "hidden": self.hidden}
        arrays |= {tensor.past: rows for tensor, rows in self.rows.items()}
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)

    @classmethod
    def read(cls, folder: Path, tensors: Sequence[KvTensor]) -> TargetText:
        """Read what `write` has written of these tensors.

        Raises:
            UsageError: the files are those of another text.
        """
        try:
            tokens, hidden, *rows = (
                np.load(folder / f"{name}.npy", allow_pickle=False)
                for name in ("tokens", "hidden", *(tensor.past for tensor in tensors))
            )
        except (OSError, ValueError, EOFError) as error:
            raise _other_text(folder, error) from None
        if (
            tokens.dtype != np.int64
            or tokens.ndim != 2
            or any(array.shape[:2] != tokens.shape for array in (hidden, *rows))
        ):
            raise _other_text(folder, f"tokens {tokens.shape} and states {hidden.shape}")
        return cls(tokens, hidden, dict(zip(tensors, rows, strict=True)))


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter and its target.

    Attributes:
        checkpoint: the drafter.
        target: the bundle whose cache it reads.
        source: the checkpoint of the target, as the bundle has it.
    """

    checkpoint: Checkpoint
    target: Bundle
    source: Checkpoint

    @classmethod
    def open(cls, name: str, target: Bundle) -> Drafter:
        """Open a drafter for a target, whose checkpoint is where it was when the bundle was exported.

        Raises:
            UsageError: the bundle gives no hidden state, or its keys and values have transforms that it does not hold.
            CheckpointError: the drafter or the target's checkpoint cannot be read, or they do not belong together.
        """
        manifest, at = target.manifest, f"--draft-for {target.path}"
        if manifest.target is not None or not manifest.model.gives_hidden:
            fix = "Export the target with --give-hidden."
            got = "a drafter" if manifest.target is not None else "graphs that give logits alone"
            raise UsageError(at, got=got, expected="graphs that give the last hidden state", fix=fix)
        plain = open_source(manifest, None)
        source = plain.as_spec(manifest.model)
        drafter = cls(Checkpoint.open_drafter(name, source, _frame(target, plain)), target, source)
        recipe = manifest.recipe
        folded = {recipe.rotation, recipe.value_rotation, recipe.key_scaling} - {"none"}
        if folded and not drafter.is_cached_apart:
            names = ", ".join(sorted(folded))
            fix = 'Export the target with a recipe whose heads are "aligned" or "none", and nothing else rotated.'
            expected = "one with neither rotation nor scaling"
            raise UsageError(at, got=f"a recipe with {names}", expected=expected, fix=fix)
        return drafter

    @property
    def spec(self) -> DecoderSpec:
        """The drafter's layers, behind those of its target."""
        return self.checkpoint.spec

    @property
    def is_cached_apart(self) -> bool:
        """See `TargetState`."""
        return self.spec.target is not None and self.spec.target.is_cached_apart

    @property
    def read(self) -> list[KvTensor]:
        """The tensors of the target's cache that it reads."""
        if self.is_cached_apart:
            return []
        owners = sorted({self.spec.cache_layer(layer) for layer in self.spec.own_layers})
        return [*self.target.manifest.interface.tensors(owners)]

    @property
    def heads(self) -> AlignedHeads | None:
        """The transforms of single heads that the target's keys and values have, if it reads them."""
        return None if self.is_cached_apart else heads_of(self.target)

    @property
    def graphs(self) -> list[GraphRecord]:
        """A graph of one token for each context of the target, and with a cache of its own as many as that prefills."""
        target, graphs = self.target.manifest, list[GraphRecord]()
        prefilled = {graph.ar for graph in target.graphs if graph.role == "prefill"} if self.is_cached_apart else set()
        for context in target.contexts:
            for ar in sorted({1} | {rows for rows in prefilled if rows < context}):
                name, first, stop = f"ar{ar}_cl{context}", self.spec.first_layer, self.spec.layers
                part = PartRecord(
                    name=name, file=f"{name}{GRAPH_SUFFIX}", first_layer=first, stop_layer=stop, embeds=True, head=True
                )
                role: Role = "decode" if ar == 1 else "prefill"
                graphs.append(GraphRecord(name=name, parts=[part], ar=ar, context=context, role=role))
        return graphs

    def transforms(self, recipe: RecipeRecord) -> RecipeRecord:
        """A recipe's transforms, as far as they are the target's."""
        return msgspec.structs.replace(
            recipe,
            rotation="none",
            neuron_scaling="none",
            outlier_channels="keep",
            value_rotation="none",
            key_scaling="none",
            heads="none" if self.is_cached_apart else self.target.manifest.recipe.heads,
        )

    def text(self, windows: NDArray[np.int64]) -> TargetText:
        """Run the target in float on windows of tokens `[windows, T+1]`."""
        tensors, spec, context = transformed_as(self.target, self.source), self.source.spec, windows.shape[1] - 1
        seen: dict[str, list[Floats]] = {tensor.past: [] for tensor in self.read}

        def observe(name: str, value: Floats) -> None:
            if name in seen:
                seen[name].append(value)

        runs = [*windows[:, :-1]]
        limit = self.target.manifest.context
        states = Reference(tensors, limit).states(runs, observe=observe)
        ops = NumpyOps(spec, Weights(tensors), context, limit)
        hidden = np.stack([last_norm(ops, spec, state) for state in states])
        encodings = self.target.manifest.encodings
        rows = {}
        for tensor in self.read:
            encoding, seen_rows = encodings[tensor.past], np.stack(seen[tensor.past])
            rows[tensor] = encoding.dequantize(encoding.quantize(seen_rows)).astype(np.float32)
        return TargetText(windows[:, 1:], hidden, rows)


def _other_text(folder: Path, got: object) -> UsageError:
    fix = "Remove the folder, and run the same command again."
    return UsageError(str(folder), got=got, expected="what a drafter reads of its target", fix=fix)


def _frame(bundle: Bundle, source: Checkpoint) -> Floats:
    """From the hidden states that a bundle's graphs give to those of its checkpoint, `[H, H]`."""
    target = transformed_as(bundle, source)
    exact = np.diag(source.tensor(FINAL_NORM))
    name = bundle.manifest.recipe.rotation
    if name != "none":
        exact = ResidualRotation(source.spec, source.tensor, name).rotated(exact)
    weights = target.tensor(FINAL_NORM)[: source.spec.hidden] * np.float32(target.spec.head_gain)
    return np.asarray(exact / weights, np.float32)


def check_given(names: Iterable[str]) -> None:
    """Refuse fields of `ExportOptions` that change nothing in a drafter.

    Args:
        names: of those that were given.

    Raises:
        UsageError: naming the field.
    """
    for name in names:
        if name not in _READ:
            expected = "what the target has" if name in _TARGETS_OWN else "a model of its own"
            fix = "Leave it out, and run edgekv compile on the bundle." if name == "compile" else "Leave it out."
            field = "--lora-slots" if name == "lora" else name
            raise UsageError(field, got="it with --draft-for", expected=expected, fix=fix)


def check_options(options: ExportOptions) -> None:
    """Refuse options that a drafter's export does not have."""
    usual = ExportOptions(options.device)
    check_given(field.name for field in fields(options) if getattr(options, field.name) != getattr(usual, field.name))
    if options.allocates:
        fix = f"Use --recipe {DEFAULT_RECIPE}."
        raise UsageError("recipe", got="bits on average with --draft-for", expected="a type for each matrix", fix=fix)
