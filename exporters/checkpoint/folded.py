"""A checkpoint with all that a recipe folds into its weights: the same logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgekv.bundle import Bundle, RecipeRecord
from edgekv.spec import views
from exporters.checkpoint.aligned import HEADS_FILE, AlignedHeads, AlignedTransforms, read_heads
from exporters.checkpoint.checkpoint import EVERY, Checkpoint, Rows
from exporters.checkpoint.factors import Factors
from exporters.checkpoint.heads import HeadTransforms
from exporters.checkpoint.neurons import NeuronScaling
from exporters.checkpoint.rotate import Floats, ResidualRotation
from exporters.quantize.reference import Tensors
from quant import QuantizedWeight


class FoldedCheckpoint:
    """The tensors of a checkpoint, first with its residual rotated, then with its heads and neurons transformed.

    What is folded into a tensor follows from its `View`.
    """

    def __init__(
        self,
        tensors: Tensors,
        recipe: RecipeRecord,
        heads: AlignedHeads | None = None,
        neurons: Mapping[int, Floats] | None = None,
    ) -> None:
        """Fold on access.

        Args:
            tensors: the checkpoint.
            recipe: the transforms.
            heads: those of single heads, if the recipe aligns them.
            neurons: factors of neurons by layer, if they are known.
        """
        self.spec = tensors.spec
        self.head_key = tensors.head_key
        if recipe.rotation != "none" and self.spec.post_norms:
            raise ValueError("recipe: got a rotation of a residual with post-norms; expected none")
        self._tensors = tensors
        self._views = {view.name: view for view in views(self.spec)}
        self._rotation = None if recipe.rotation == "none" else ResidualRotation(self.spec, tensors.tensor)
        self._neurons = None if recipe.neuron_scaling == "none" else NeuronScaling(self.spec, self._rotated, neurons)
        self._heads: HeadTransforms | AlignedTransforms
        if heads is None:
            self._heads = HeadTransforms(self.spec, recipe.value_rotation, recipe.key_scaling, self._rotated)
        else:
            self._heads = AlignedTransforms(self.spec, heads, self._rotated)

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """As `Checkpoint.tensor`."""
        view = self._views[key]
        if self._neurons is not None and self._neurons.changes(view):
            return self._neurons.tensor(view, rows)
        if not self._heads.changes(view):
            return self._rotated(key, rows)
        part: Floats = self._heads.tensor(view)[rows]
        return part

    def integers(self, key: str, rows: slice = EVERY) -> QuantizedWeight:
        """As `Checkpoint.integers`: factors of rows go into the scales of output channels.

        Raises:
            ValueError: the matrix is changed, so that no integer stays.
        """
        view = self._views[key]
        factors = self._heads.factors(view) if isinstance(self._heads, HeadTransforms) else None
        scaled = self._neurons is not None and self._neurons.changes(view)
        if self._rotation is not None or scaled or (factors is None and self._heads.changes(view)):
            raise ValueError(f"{key}: got a matrix that is changed; expected one as it is stored")
        weight = self._tensors.integers(key, rows)
        if factors is None:
            return weight
        return QuantizedWeight(weight.integers, replace(weight.grid, scales=weight.scales * factors[rows]))

    def change(self, key: str, change: Factors) -> Factors:
        """A change of a matrix, such as an adapter's, after the transforms."""
        view = self._views[key]
        if self._rotation is not None:
            change = self._rotation.change(view, change)
        if self._neurons is not None and self._neurons.changes(view):
            return self._neurons.change(view, change)
        return self._heads.change(view, change) if self._heads.changes(view) else change

    def neuron_scales(self, layer: int) -> Floats | None:
        """The factor of each neuron of a layer, `[intermediate]`; None if they are not scaled."""
        return None if self._neurons is None else self._neurons.scales(layer)

    def _rotated(self, key: str, rows: Rows) -> Floats:
        if self._rotation is None:
            return self._tensors.tensor(key, rows)
        return self._rotation.tensor(self._views[key], rows)


def transformed(checkpoint: Tensors, recipe: RecipeRecord, heads: AlignedHeads | None = None) -> Tensors:
    """The checkpoint with all that a recipe folds into its weights: the same logits.

    Args:
        checkpoint: the weights.
        recipe: the transforms.
        heads: those of single heads, if the recipe aligns them.
    """
    scalings = {recipe.key_scaling, recipe.neuron_scaling}
    if {recipe.rotation, recipe.value_rotation, recipe.heads, *scalings} == {"none"}:
        return checkpoint
    if (heads is None) != (recipe.heads == "none"):
        raise ValueError(f"heads: got {'none' if heads is None else 'some'}; expected what the recipe says")
    return FoldedCheckpoint(checkpoint, recipe, heads)


def transformed_as(bundle: Bundle, checkpoint: Checkpoint) -> Tensors:
    """The checkpoint of a bundle with its vocabulary, and all that was folded into its weights.

    Raises:
        BundleError: the file of the transforms is broken.
    """
    manifest, heads = bundle.manifest, None
    if manifest.recipe.heads != "none":
        heads = read_heads(bundle.path / HEADS_FILE, manifest.files[HEADS_FILE].bytes)
    return transformed(checkpoint.with_vocabulary(manifest.model.vocabulary), manifest.recipe, heads)
