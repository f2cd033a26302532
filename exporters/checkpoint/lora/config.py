"""`adapter_config.json` of peft."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import regex

from edgekv.errors import CheckpointError
from edgekv.spec import Config, read_json

ADAPTER_CONFIG = "adapter_config.json"

_NO_EFFECT = {
    *("alora_invocation_string", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config"),
    *("eva_config", "fan_in_fan_out", "inference_mode", "lora_dropout", "lora_ga_config", "loftq_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
}
"""Fields of training, of loading, or of modules that decoders do not have (`fan_in_fan_out` of GPT-2's Conv1D)."""
_READ = {
    *("alpha_pattern", "base_weights_sha256", "bias", "exclude_modules", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules"),
    "use_rslora",
}
_BIASES = ("none", "all", "lora_only")
_LARGEST_ALPHA = 1e6
_LONGEST_PATTERN = 1000
_MATCHING_S = 0.5  # a thousand times what patterns of real adapters take
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGE = "Merge it into its base model in peft (merge_and_unload, then save_pretrained) and export the result."


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A regular expression for names of modules, which comes with an adapter: it may be made to run for ever.

    Attributes:
        text: as the adapter has it.
        field: where it stands, for errors.
    """

    text: str
    field: str

    @classmethod
    def read(cls, config: Config, name: str, text: str) -> ModulePattern:
        """A pattern of a field.

        Raises:
            CheckpointError: it is no regular expression, or too long.
        """
        expected = f"a regular expression of at most {_LONGEST_PATTERN} characters, or a list of names"
        if len(text) > _LONGEST_PATTERN:
            raise config.refusal(name, expected, got=f"{len(text)} characters")
        try:
            regex.compile(text)
        except (regex.error, RecursionError, OverflowError):
            raise config.refusal(name, expected, got=repr(text)[:80]) from None
        return cls(text, name)

    def matches(self, module: str) -> bool:
        """Whether it matches a whole name.

        Raises:
            CheckpointError: it did not end in time.
        """
        try:
            return regex.fullmatch(self.text, module, timeout=_MATCHING_S) is not None
        except TimeoutError:
            raise CheckpointError(
                f"{ADAPTER_CONFIG}: {self.field}",
                got=f"{self.text[:80]!r}, which still looked for {module} after {_MATCHING_S:g} s",
                expected="a pattern that ends",
                fix="Write the names of the modules instead, as a list.",
            ) from None

    def ends(self, module: str) -> bool:
        """Whether it matches a name, or what follows one of the name's dots."""
        starts = [0, *(dot.end() for dot in re.finditer(r"\.", module))]
        return any(self.matches(module[start:]) for start in starts)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """How an adapter changes the modules of a model.

    Attributes:
        base: name of the model that it was trained on; empty if unknown.
        base_sha256: hash of that model's weight files, as edgekv's manifests have it; empty if unknown.
        rank: r of modules that `ranks` does not match.
        alpha: lora_alpha of modules that `alphas` does not match.
        rank_stabilized: whether alpha is divided by the root of r.
        ranks: r by pattern of a module's name.
        alphas: lora_alpha by pattern.
        targets: ends of names, or one regular expression.
        excluded: likewise; empty for none.
        layers: the layers that are changed; None for all.
        saved: ends of names of the modules that are replaced.
        biases: whether biases are replaced.
    """

    base: str
    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[ModulePattern, int]
    alphas: Mapping[ModulePattern, float]
    targets: tuple[str, ...] | ModulePattern
    excluded: tuple[str, ...] | ModulePattern
    layers: frozenset[int] | None
    saved: tuple[str, ...]
    biases: bool
    base_sha256: str = ""

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Read `adapter_config.json`.

        Raises:
            CheckpointError: naming the field that cannot be merged.
        """
        fields = read_json(folder / ADAPTER_CONFIG)
        config = Config(fields, str(folder / ADAPTER_CONFIG))
        if config.text("peft_type") != "LORA":
            raise config.refusal("peft_type", "LORA", fix=_MERGE)
        if config.text("task_type", "CAUSAL_LM") != "CAUSAL_LM":
            raise config.refusal("task_type", "CAUSAL_LM", fix="Use an adapter of a language model.")
        for name, value in fields.items():
            if value and name not in _NO_EFFECT | _READ:
                raise config.refusal(name, "nothing, or false", fix=_MERGE)
        start = fields.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            fix = "Save it with path_initial_model_for_weight_conversion: its start changes the base model."
            raise config.refusal("init_lora_weights", "true, or another start that keeps the base model", fix=fix)
        layers = fields.get("layers_to_transform")
        numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
        if not all(type(number) is int for number in numbers):
            raise config.refusal("layers_to_transform", "layer numbers")
        ranks, alphas = config.table("rank_pattern"), config.table("alpha_pattern")
        if (bias := config.text("bias", "none")) not in _BIASES:
            raise config.refusal("bias", " or ".join(_BIASES))
        return cls(
            base=config.text("base_model_name_or_path", ""),
            rank=config.size("r", 8),
            alpha=_alpha(config, "lora_alpha", 8),
            rank_stabilized=config.flag("use_rslora"),
            ranks={ModulePattern.read(config, "rank_pattern", name): ranks.size(name) for name in ranks.names},
            alphas={ModulePattern.read(config, "alpha_pattern", name): _alpha(alphas, name) for name in alphas.names},
            targets=_modules(config, "target_modules", fields.get("target_modules")),
            excluded=_modules(config, "exclude_modules", fields.get("exclude_modules") or []),
            layers=frozenset(numbers) or None,
            saved=config.texts("modules_to_save") if "modules_to_save" in config else (),
            biases=bias != "none",
            base_sha256=config.text("base_weights_sha256", ""),
        )

    def changes(self, module: str) -> bool:
        """Whether a module has an adapter, by peft's rules."""
        if _matches(self.excluded, module) or not _matches(self.targets, module):
            return False
        layer = re.search(r"\.(\d+)\.", module)
        return self.layers is None or (layer is not None and int(layer[1]) in self.layers)

    def replaces(self, module: str) -> bool:
        """Whether a module is replaced by the adapter's."""
        return _matches(self.saved, module)

    def rank_of(self, module: str) -> int:
        """Its r."""
        return next((rank for pattern, rank in self.ranks.items() if pattern.ends(module)), self.rank)

    def scaling(self, module: str) -> float:
        """What multiplies the product of its two matrices."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if pattern.ends(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _alpha(config: Config, name: str, default: float | None = None) -> float:
    alpha = config.number(name, default)
    if abs(alpha) > _LARGEST_ALPHA:
        raise config.refusal(name, f"at most {_LARGEST_ALPHA:g} in magnitude")
    return alpha


def _modules(config: Config, name: str, value: object) -> tuple[str, ...] | ModulePattern:
    if value == "all-linear":
        return ModulePattern(r".*\.layers\..*", name)
    if not isinstance(value, str):
        return config.texts(name) if value != [] else ()
    return ModulePattern.read(config, name, value)


def _matches(names: tuple[str, ...] | ModulePattern, module: str) -> bool:
    if isinstance(names, ModulePattern):
        return names.matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def refuse(what: str, got: str, expected: str, base: str) -> CheckpointError:
    """The error that refuses a tensor of an adapter.

    Args:
        what: folder and tensor.
        got: what it is.
        expected: what the model wants.
        base: the model that it was trained on; empty if unknown.
    """
    fix = f"It was trained on {base}: use that model." if base else "Use it with the model that it was trained on."
    return CheckpointError(what, got=got, expected=expected, fix=fix)
