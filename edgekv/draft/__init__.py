"""Drafts: tokens that may follow a text, guessed without the model. It knows tokens alone, no model."""

from edgekv.draft.drafter import Drafter, Pacer

__all__ = ["Drafter", "Pacer"]
