"""A checkpoint with all that a recipe folds into its weights: the same logits."""

from __future__ import annotations

from collections.abc import Mapping

from edgekv.bundle import HEADS_FILE, Bundle, RecipeRecord
from edgekv.spec import LAYER_INPUTS, views
from exporters.checkpoint.aligned import AlignedHeads, AlignedTransforms, read_heads
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import EVERY, Factors, Floats, Rows, Transform, folded, folds
from exporters.checkpoint.heads import HeadTransforms
from exporters.checkpoint.neurons import NeuronScaling
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.tensors import Tensors
from quant import QuantizedWeight


class FoldedCheckpoint:
    """The tensors of a checkpoint: its residual rotated, then its neurons and heads transformed."""

    def __init__(
        self,
        tensors: Tensors,
        recipe: RecipeRecord,
        heads: AlignedHeads | None = None,
        neurons: Mapping[int, Floats] | None = None,
        directions: Floats | None = None,
    ) -> None:
        """Fold on access.

        Args:
            tensors: the checkpoint.
            recipe: the transforms.
            heads: those of single heads, if the recipe aligns them.
            neurons: factors of neurons by layer, if they are known.
            directions: of the rotation `principal`, if they are known.
        """
        self.spec = spec = tensors.spec
        if recipe.rotation != "none" and spec.post_norms:
            raise ValueError("recipe: got a rotation of a residual with post-norms; expected none")
        self._tensors = tensors
        self._views = {view.name: view for view in views(spec)}
        rotation = list[ResidualRotation]()
        if recipe.rotation != "none":
            rotation.append(ResidualRotation(spec, tensors.tensor, recipe.rotation, directions))
        self._rotation = rotation
        rotated = folded(tensors.tensor, self._views, rotation)
        scaling = recipe.neuron_scaling
        self._neurons = None if scaling == "none" else NeuronScaling(rotated, scaling, neurons)
        in_heads: Transform
        if heads is None:
            in_heads = HeadTransforms(spec, recipe.value_rotation, recipe.key_scaling, rotated)
        else:
            in_heads = AlignedTransforms(spec, heads)
        self._transforms = [*rotation, *([] if self._neurons is None else [self._neurons]), in_heads]
        self._read = folded(tensors.tensor, self._views, self._transforms)

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """As `Checkpoint.tensor`."""
        if key == LAYER_INPUTS and self.spec.picture_layers and self._rotation:
            table = self._tensors.tensor(key, rows)
            return self._rotation[0].rotated(table.reshape(-1, self.spec.hidden)).reshape(table.shape)
        return self._read(key, rows)

    def integers(self, key: str, rows: slice = EVERY) -> QuantizedWeight:
        """As `Checkpoint.integers`: factors of rows go into the scales of output channels.

        Raises:
            ValueError: the matrix is changed, so that no integer stays.
        """
        weight = self._tensors.integers(key, rows)
        for fold in folds(self._views[key], self._transforms):
            weight = fold.integers(weight, rows)
        return weight

    def change(self, key: str, change: Factors) -> Factors:
        """A change of a matrix, such as an adapter's, after the transforms."""
        for fold in folds(self._views[key], self._transforms):
            change = fold.change(change)
        return change

    @property
    def directions(self) -> Floats | None:
        """See `ResidualRotation.directions`; None without a rotation."""
        return next((rotation.directions for rotation in self._rotation), None)

    def neuron_scales(self, layer: int) -> Floats | None:
        """The factor of each neuron of a layer, `[intermediate]`; None if they are not scaled."""
        return None if self._neurons is None else self._neurons.scales(layer)


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
    """The checkpoint of a bundle with all that was folded into its weights.

    Raises:
        BundleError: the file of the transforms is broken.
        CheckpointError: it is another decoder's.
    """
    return transformed(checkpoint.as_spec(bundle.manifest.model), bundle.manifest.recipe, heads_of(bundle))


def heads_of(bundle: Bundle) -> AlignedHeads | None:
    """The transforms of single heads that were folded into a bundle's weights, if its recipe aligns them.

    Raises:
        BundleError: their file is broken.
    """
    if bundle.manifest.recipe.heads == "none":
        return None
    return read_heads(bundle.path / HEADS_FILE, bundle.manifest.files[HEADS_FILE].bytes)
