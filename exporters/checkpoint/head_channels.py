"""What all transforms of heads do with a tensor, or with a matrix that is a product of two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from edgekv.spec import View
from exporters.checkpoint.checkpoint import EVERY
from exporters.checkpoint.factors import Factors
from exporters.checkpoint.rotate import Floats, Read


class HeadChannels(ABC):
    """Changes the channels of heads: the output channels of q_proj, k_proj, v_proj and norms, and the inputs of o_proj.

    Args:
        read: the tensors before, by name and rows.
    """

    def __init__(self, read: Read) -> None:
        self._read = read

    @abstractmethod
    def changes(self, view: View) -> bool:
        """Whether the tensor is another one after the transforms."""

    def tensor(self, view: View) -> Floats:
        """A whole tensor after the transforms, one that they change."""
        return self._changed(view, self._read(view.name, EVERY))

    def change(self, view: View, change: Factors) -> Factors:
        """A change of a matrix after the transforms, one that they change."""
        if view.role == "o":
            return replace(change, right=self._changed(view, change.right))
        return replace(change, left=self._changed(view, change.left))

    @abstractmethod
    def _changed(self, view: View, stored: Floats) -> Floats:
        """A tensor, or the factor of a matrix that has the channels of its heads."""
