"""`adapter_config.json` of peft."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGE = "Merge it into its base model in peft (merge_and_unload, then save_pretrained) and export the result."


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
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | re.Pattern[str]
    excluded: tuple[str, ...] | re.Pattern[str]
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
        if not all(type(each) is int for each in numbers):
            raise config.refusal("layers_to_transform", "layer numbers")
        ranks, alphas = config.table("rank_pattern"), config.table("alpha_pattern")
        for name, table in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            for pattern in table.names:
                _compiled(config, name, pattern)
        return cls(
            base=config.text("base_model_name_or_path", ""),
            rank=config.size("r", 8),
            alpha=config.number("lora_alpha", 8),
            rank_stabilized=config.flag("use_rslora"),
            ranks={name: ranks.size(name) for name in ranks.names},
            alphas={name: alphas.number(name) for name in alphas.names},
            targets=_modules(config, "target_modules", fields.get("target_modules")),
            excluded=_modules(config, "exclude_modules", fields.get("exclude_modules") or []),
            layers=frozenset(numbers) or None,
            saved=config.texts("modules_to_save") if "modules_to_save" in config else (),
            biases=config.text("bias", "none") != "none",
            base_sha256=config.text("base_weights_sha256", ""),
        )

    def changes(self, module: str) -> bool:
        """Whether a module has an adapter, by peft's rules."""
        if _matches(self.excluded, module) or not _matches(self.targets, module):
            return False
        found = re.search(r"\.(\d+)\.", module)
        return self.layers is None or (found is not None and int(found[1]) in self.layers)

    def replaces(self, module: str) -> bool:
        """Whether a module is replaced by the adapter's."""
        return _matches(self.saved, module)

    def rank_of(self, module: str) -> int:
        """Its r."""
        return next((rank for pattern, rank in self.ranks.items() if _is_named(pattern, module)), self.rank)

    def scaling(self, module: str) -> float:
        """What multiplies the product of its two matrices."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _is_named(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _modules(config: Config, name: str, value: object) -> tuple[str, ...] | re.Pattern[str]:
    if value == "all-linear":
        return re.compile(r".*\.layers\..*")
    if not isinstance(value, str):
        return config.texts(name) if value != [] else ()
    return _compiled(config, name, value)


def _compiled(config: Config, name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error:
        raise config.refusal(name, "a regular expression, or a list of names") from None


def _matches(names: tuple[str, ...] | re.Pattern[str], module: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_named(pattern: str, module: str) -> bool:
    """Whether a pattern of ranks or alphas stands for a module: its name, the end of it, or a regular expression."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


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
