"""Makes a single-head-attention graph fast on a CPU: fewer, larger nodes and less memory traffic.

`merged_bytes` changes no bit, unless rows must be alike in graphs of every AR. `rendered_graph` also multiplies the
bundle's integers without a float copy of them, and keeps activations in float.
"""

from edgekv.runtime.merge.kept import WEIGHT_SUFFIXES, merged_bytes, rendered_graph

__all__ = ["WEIGHT_SUFFIXES", "merged_bytes", "rendered_graph"]
