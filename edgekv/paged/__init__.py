"""Attention over keys and values that lie in blocks: OpenVINO's PagedAttention as a vectorized numpy reference.

`paged_attention` is the operator; `rotation_trig_lut` makes its table for keys that move to earlier positions.
"""

from edgekv.paged.attention import paged_attention
from edgekv.paged.errors import PagedInputError
from edgekv.paged.rotation import rotation_trig_lut

__all__ = ["PagedInputError", "paged_attention", "rotation_trig_lut"]
