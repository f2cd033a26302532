"""Recipes: which integer type and rounding method each matrix gets, by rules over tensor names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edgekv.bundle import (
    HeadsName,
    KeyScalingName,
    MatrixMethod,
    NeuronScalingName,
    OutlierChannels,
    RecipeRecord,
    RotationName,
    ValueRotationName,
    WeightRecord,
)
from edgekv.errors import UsageError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.json_file import readable_json
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import MIB, read_file
from edgekv.spec.decoder import DecoderSpec, SplitChannel, Vocabulary
from edgekv.spec.sizes import FRONT, HEAD_MARK, MAX_BITS, MIN_BITS, Decoder, end_layers, front_bits, head_type
from edgekv.spec.tensors import HEAD, HEAD_TURN, matrices
from edgekv.spec.vision import CENTER, TABLE, EncoderSpec
from exporters.checkpoint.neurons import applied_scaling
from exporters.checkpoint.rotate import applied_rotation
from exporters.quantize.attention import weighed_projections
from exporters.quantize.effort import Effort
from quant import FITTED, WEIGHT_TYPES, WeightDtype

_FRONT_BASE = "w4a16"
_RECORDED = tuple(name for name in RecipeRecord.__struct_fields__ if name != "weights")
"""Fields that a manifest has too."""
_MeanBits = Annotated[float, msgspec.Meta(ge=MIN_BITS, le=MAX_BITS)]


class WeightRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the matrices with matching names are quantized.

    Attributes:
        tensors: a pattern with `*` and `?` over names such as `model.layers.3.mlp.down_proj.weight`.
        dtype: integer type.
        method: rounding method, see `quant.quantize`; `stored` keeps the integers of a quantized checkpoint.
    """

    tensors: str
    dtype: WeightDtype
    method: MatrixMethod = "gptq"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recipe, as its file has it.

    Attributes:
        name: of the file, without its suffix; a file may leave it out.
        weights: rules for matrices; if several match a name, the last one wins.
        activations: type of every activation.
        rotation: `hadamard` or `principal` rotates the residual and is folded into the weights; see
            `checkpoint.rotate`.
        value_rotation: `hadamard` rotates the values of each head, folded into `v_proj` and `o_proj`.
        key_scaling: `pairs` scales the keys of each head pair by pair, folded into `q_proj` and `k_proj`.
        neuron_scaling: `equal` or `norm` scales the neurons of the feed-forward; see `exporters.checkpoint.neurons`.
        outlier_channels: `split` represents outlier channels of the residual by several, where norms behind the blocks
            forbid a rotation; see `exporters.checkpoint.channels`. `keep` leaves them as they are.
        keep_stored: whether the matrices of a quantized checkpoint keep their types and integers where a bundle has
            them; see `exporters.quantize.as_stored`.
        heads: `aligned` turns and scales keys and values of each head; see `exporters.checkpoint.aligned`. It replaces
            `value_rotation` and `key_scaling`.
        ends: type of all matrices in the first layer and the last ones; see `edgekv.spec.end_layers`. It wins over the
            rules. None for that of the rules.
        mean_bits: bits a weight that the matrices of the layers have at most on average, with their scales; an export
            gives each the type with which they lose least. None for the types of the rules.
        encoder_16bit: patterns over names of matrices of a vision encoder, such as `vision.layers.*.fc2.weight`, that
            get 16 bits instead of 8; see `EncoderSpec.wide`.
    """

    name: str = ""
    weights: tuple[WeightRule, ...]
    activations: Literal["u16"] = "u16"
    rotation: RotationName = "none"
    value_rotation: ValueRotationName = "none"
    key_scaling: KeyScalingName = "none"
    neuron_scaling: NeuronScalingName = "none"
    outlier_channels: OutlierChannels = "split"
    keep_stored: bool = False
    heads: HeadsName = "none"
    ends: WeightDtype | None = None
    mean_bits: _MeanBits | None = None
    encoder_16bit: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: RecipeRecord) -> Recipe:
        """The recipe of a manifest: one rule for what most matrices have, and one for each other matrix."""
        kinds = Counter((weight.dtype, weight.method) for weight in record.weights)
        (dtype, method), _ = kinds.most_common(1)[0]
        rules = [WeightRule(tensors="*", dtype=dtype, method=method)]
        rules += [
            WeightRule(tensors=weight.tensor, dtype=weight.dtype, method=weight.method)
            for weight in record.weights
            if (weight.dtype, weight.method) != (dtype, method)
        ]
        return cls(weights=tuple(rules), **{name: getattr(record, name) for name in _RECORDED})

    def record(self, spec: DecoderSpec) -> RecipeRecord:
        """As a manifest has it: the rule of each matrix, without transforms that the decoder cannot have.

        Raises:
            UsageError: no rule matches a matrix.
        """
        rules = ((name, self.rule(name)) for name in matrices(spec))
        weights = [WeightRecord(tensor=name, dtype=rule.dtype, method=rule.method) for name, rule in rules]
        asked = RecipeRecord(weights=weights, **{name: getattr(self, name) for name in _RECORDED})
        rotation, scaling = applied_rotation(spec, self.rotation), applied_scaling(spec, self.neuron_scaling)
        return msgspec.structs.replace(asked, rotation=rotation, neuron_scaling=scaling)

    def write(self, file: Path) -> None:
        """Write a recipe file that `find_recipe` reads; it appears atomically.

        Raises:
            UsageError: the file cannot be written, or has the wrong suffix.
        """
        check_recipe_path(file)
        named = msgspec.structs.replace(self, name=file.stem)
        try:
            with atomic_file(file) as partial:
                partial.write_bytes(readable_json(named, indent=2))
        except OSError as error:
            raise UsageError(
                str(file), got=error.strerror, expected="a file that can be written", fix="Choose another place."
            ) from None

    def for_decoder(self, decoder: Decoder) -> Recipe:
        """With rules for the layers at the ends of a decoder in place of `ends`."""
        if self.ends is None:
            return self
        rules = [
            WeightRule(tensors=f"model.layers.{layer}.*", dtype=self.ends, method="gptq")
            for layer in sorted(end_layers(decoder))
        ]
        return msgspec.structs.replace(self, weights=(*self.weights, *rules), ends=None)

    def with_effort(self, effort: Effort, spec: DecoderSpec) -> Recipe:
        """The same types, rounded with this effort.

        Raises:
            UsageError: it writes text for a recipe in which no rule has GPTQ.
        """
        if not effort.fits:
            rules = tuple(
                rule if rule.method == "stored" else msgspec.structs.replace(rule, method="nearest")
                for rule in self.weights
            )
            return msgspec.structs.replace(self, weights=rules)
        fits_text = any(rule.method in FITTED for rule in self.weights)
        if effort.written_tokens and not fits_text:
            raise UsageError(
                f"--effort {effort.level}",
                got=f"the recipe {self.name}, in which no rule has the method gptq",
                expected="a recipe that rounds on calibration text",
                fix="Use --effort 1, or another --recipe.",
            )
        rules = tuple(
            msgspec.structs.replace(rule, method="descent")
            if rule.method == "gptq" and WEIGHT_TYPES[rule.dtype].bits <= effort.descent_bits
            else rule
            for rule in self.weights
        )
        rounded = msgspec.structs.replace(self, weights=rules)
        if not effort.weighs_attention:
            return rounded
        weighed = [
            WeightRule(tensors=name, dtype=rule.dtype, method="attention")
            for name in weighed_projections(spec)
            if (rule := rounded.rule(name)).method == "descent"
        ]
        return msgspec.structs.replace(rounded, weights=(*rules, *weighed))

    def for_blocks(self) -> Recipe:
        """With the rotation that gains most where most matrices have block scales, if it has any."""
        return self if self.rotation == "none" else msgspec.structs.replace(self, rotation="principal")

    def shares_vocabulary(self, spec: DecoderSpec) -> bool:
        """Whether the head's matrix is the table of embeddings too: that has 8 bits, and keeps its rows' means."""
        rule = self.rule(HEAD)
        return (
            spec.tied_head
            and not (spec.layer_norms or spec.embedding_norm)
            and rule.dtype == "int8"
            and rule.method != "stored"
        )

    def sharing_vocabulary(self, vocabulary: Vocabulary) -> Recipe:
        """With a head whose rows are embeddings too, and the matrix in front of it, if there is one, in 8 bits.

        That matrix makes up for what matrices of 4 bits left in the head's inputs, as the head itself would. A rule of
        its own, such as a bundle's recipe has, stays. Without it the residual is not rotated: some inputs of the head
        are far larger than others, and GPTQ would move their errors into embeddings of the others.
        """
        method = self.rule(HEAD).method
        own = [rule for rule in self.weights if rule.tensors == HEAD_TURN]
        turn = WeightRule(tensors=HEAD_TURN, dtype="int8", method=own[-1].method if own else method)
        head = WeightRule(tensors=HEAD, dtype="int8", method=method if vocabulary == "turned" else "nearest")
        return msgspec.structs.replace(self, weights=(*self.weights, turn, head))

    def with_head(self, dtype: WeightDtype) -> Recipe:
        """With another type of the head."""
        rule = WeightRule(tensors=HEAD, dtype=dtype, method=self.rule(HEAD).method)
        return msgspec.structs.replace(self, weights=(*self.weights, rule))

    def rule(self, tensor: str) -> WeightRule:
        """The rule for a matrix.

        Raises:
            UsageError: no rule matches.
        """
        rules = [rule for rule in self.weights if fnmatchcase(tensor, rule.tensors)]
        if rules:
            return rules[-1]
        raise UsageError(
            f"--recipe {self.name}",
            got=f"no rule for {tensor}",
            expected="a rule for every matrix",
            fix='Begin the list of weights with a rule for "*".',
        )

    def wide_matrices(self, encoder: EncoderSpec) -> tuple[str, ...]:
        """The matrices of a vision encoder that get 16 bits, a table of positions always; those of means stay at 8.

        Raises:
            UsageError: a pattern matches none.
        """
        names = [name for name in encoder.matrices if "_mean" not in name and name != CENTER]
        for pattern in self.encoder_16bit:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"--recipe {self.name}: encoder_16bit",
                    got=repr(pattern),
                    expected=f"a pattern that matches a matrix, such as {names[0]} or {names[-1]}",
                    fix="Correct it, or leave it out; edgekv eval --layers names the worst.",
                )
        patterns = (*self.encoder_16bit, TABLE)  # its values are added to each patch, where all later layers see them
        return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))

    @property
    def splits_channels(self) -> bool:
        """Whether outlier channels are split; stored integers cannot be."""
        return self.outlier_channels == "split" and not self._keeps_integers

    @property
    def _keeps_integers(self) -> bool:
        return self.keep_stored or any(rule.method == "stored" for rule in self.weights)

    def check(self, spec: DecoderSpec) -> None:
        """Check that every matrix of the decoder has a rule that fits it.

        Raises:
            UsageError: no rule matches a matrix, its inputs are not a multiple of the block size, stored integers shall
                be kept of matrices that are rotated, the errors of one cannot be weighed by attention, or two
                transforms of heads exclude each other.
        """
        changed = {self.rotation, self.value_rotation, self.heads, self.neuron_scaling} != {"none"}
        if changed and self._keeps_integers:
            raise UsageError(
                f"--recipe {self.name}",
                got="stored integers, and a rotation that changes them",
                expected="one of both",
                fix='Set rotation, value_rotation, heads and neuron_scaling to "none", or use another method.',
            )
        if self.heads != "none" and (self.key_scaling, self.value_rotation) != ("none", "none"):
            raise UsageError(
                f"--recipe {self.name}",
                got=f"heads {self.heads} with key_scaling {self.key_scaling}, value_rotation {self.value_rotation}",
                expected="one transform of keys and values",
                fix="Leave out key_scaling and value_rotation.",
            )
        weighed = weighed_projections(spec)
        for name, (_, inputs) in matrices(spec).items():
            dtype = self.rule(name).dtype
            if self.rule(name).method == "attention" and name not in weighed:
                raise UsageError(
                    f"--recipe {self.name}",
                    got=f"the method attention for {name}",
                    expected="q_proj or k_proj of a model without norms of queries and caps of scores",
                    fix='Use the method "descent" for this tensor.',
                )
            block = WEIGHT_TYPES[dtype].block
            if block and inputs % block:
                raise UsageError(
                    f"--recipe {self.name}",
                    got=f"{dtype} for {name}, which has {inputs} inputs",
                    expected=f"a multiple of {block} inputs",
                    fix="Use smaller blocks, or give this tensor a rule of its own in a recipe file.",
                )


def check_recipe_path(file: Path) -> None:
    """Check that a recipe can be written to a path and found again.

    Raises:
        UsageError: the name does not end with `.json`, or the folder does not exist.
    """
    if file.suffix != ".json":
        raise UsageError(str(file), got="a name without .json", expected="a recipe file (.json)", fix="Add it.")
    if not file.parent.is_dir():
        raise UsageError(str(file), got="no such folder", expected="a folder to write into", fix="Make it first.")


def recipe_names() -> list[str]:
    """The recipes that ship with edgekv."""
    return sorted(path.name.removesuffix(".json") for path in _folder().iterdir() if path.name.endswith(".json"))


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or of this file if the name ends with `.json`.

    `front-5` is `w4a16` with 5 bits a weight on average, `w4a16-head-int4` the same with a head in int4.

    Raises:
        UsageError: unknown name, or the file is not a recipe.
    """
    if name.endswith(".json"):
        path = Path(name)
        try:
            content = read_file(path, MIB)
        except OSError as error:
            raise _refused(f"{name}: {error.strerror}", "a recipe file", "Check the path.") from error
        stem = path.stem
    elif (based := head_type(name))[0] != name:
        return _with_head(find_recipe(based[0]), name, based[1])
    elif name in recipe_names():
        content, stem = _folder().joinpath(f"{name}.json").read_bytes(), name
    elif name.startswith(FRONT):
        return msgspec.structs.replace(find_recipe(_FRONT_BASE), name=name, mean_bits=_front_bits(name))
    else:
        expected = " or ".join([*recipe_names(), f"{FRONT}BITS"]) + f", also with {HEAD_MARK}int4 behind it"
        raise _refused(repr(name), expected, "Choose one of these, or name a .json file.")
    try:
        read = DECODERS[Recipe].decode(content)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{name}: {error}", "a recipe file", "Compare it with exporters/quantize/recipes.") from error
    if read.name not in ("", stem):
        raise _refused(
            f"{name}: the name {read.name!r}", f"{stem!r}", "Leave it out: a recipe has the name of its file."
        )
    return msgspec.structs.replace(read, name=stem)


def _with_head(base: Recipe, name: str, dtype: WeightDtype) -> Recipe:
    """A recipe with another type of the head."""
    if head_type(base.name)[0] != base.name:
        raise _refused(name, "one type of the head", f"Use --recipe {base.name}.")
    if base.keep_stored:
        expected = "a recipe that chooses the types"
        raise _refused(name, expected, "Use --recipe w4a16-head-int4, or a recipe file.")
    return msgspec.structs.replace(base.with_head(dtype), name=name)


def _front_bits(name: str) -> float:
    """The bits in the name of a recipe such as `front-4.5`."""
    if (bits := front_bits(name)) is not None:
        return bits
    expected = f"{FRONT}BITS, from {MIN_BITS} to {MAX_BITS} bits a weight"
    raise _refused(repr(name), expected, f"Use {FRONT}5.")


def describe_recipe(record: RecipeRecord, split: Sequence[SplitChannel] = ()) -> Iterator[str]:
    """How the matrices were quantized, in lines that join the layers that were treated alike, and what was split."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for weight in record.weights:
        part = re.sub(r"^model\.layers\.\d+\.((self_attn|mlp|conv)\.)?", "", weight.tensor).removesuffix(".weight")
        part = re.sub(r"^experts\.\d+\.", "experts.", part)
        names.setdefault((weight.dtype, weight.method, part), []).append(weight.tensor)
    kinds: dict[tuple[str, str], list[str]] = {}
    for (dtype, method, part), tensors in names.items():
        layers = [*dict.fromkeys(name.split(".")[2] for name in tensors if name.startswith("model.layers."))]
        count = f" of {len(layers)} layers" if len(layers) > 1 else "".join(f" of layer {layer}" for layer in layers)
        kinds.setdefault((dtype, method), []).append(part + count)
    for (dtype, method), parts in kinds.items():
        yield f"{dtype}, {method}: {', '.join(parts)}"
    yield f"rotation of the residual: {record.rotation}"
    if record.value_rotation != "none":
        yield f"rotation of each head's values: {record.value_rotation}"
    if record.key_scaling != "none":
        yield f"scaling of keys: {record.key_scaling}"
    if record.neuron_scaling != "none":
        yield f"scaling of neurons: {record.neuron_scaling}"
    if split:
        channels = ", ".join(f"{channel.channel} into {channel.parts}" for channel in split)
        yield f"outlier channels of the residual, split: {channels}"
    if record.heads != "none":
        yield f"keys and values of each head: {record.heads}"


def _folder() -> resources.abc.Traversable:
    return resources.files("exporters.quantize").joinpath("recipes")


def _refused(got: str, expected: str, fix: str) -> UsageError:
    return UsageError("--recipe", got=got, expected=expected, fix=fix)
