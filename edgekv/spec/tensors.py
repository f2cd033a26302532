"""Maps the decoder's tensor names to stored tensors, which may have other names, be fused or be shifted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgekv.spec.decoder import DecoderSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the decoder as a part of a stored one: `(stored[first:first + shape[0]] + offset) * gain`.

    Attributes:
        name: the decoder's name for it, as in Llama's checkpoints.
        shape: of the part.
        key: of the stored tensor.
        rows: of the stored tensor.
        first: first row of the part in the stored tensor.
        offset: added to every element.
        gain: multiplies every element.
    """

    name: str
    shape: tuple[int, ...]
    key: str
    rows: int
    first: int = 0
    offset: float = 0.0
    gain: float = 1.0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.rows, *self.shape[1:])


def views(spec: DecoderSpec) -> Iterator[View]:
    """Every tensor that the decoder reads, in reading order."""
    table = (spec.vocab, spec.hidden)
    yield View(EMBEDDING, table, EMBEDDING, spec.vocab, gain=spec.embedding_gain)
    for layer in range(spec.layers):
        yield from _layer(spec, f"model.layers.{layer}.")
    yield View("model.norm.weight", (spec.hidden,), "model.norm.weight", spec.hidden, offset=spec.norm_offset)
    yield View(HEAD, table, EMBEDDING if spec.tied_head else HEAD, spec.vocab, gain=spec.logits_gain)


def _layer(spec: DecoderSpec, prefix: str) -> Iterator[View]:
    query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden, spec.intermediate
    for norm in _norms(spec):
        yield _norm(spec, f"{prefix}{norm}.weight", hidden)
    if spec.qk_norm:
        whole = spec.qk_norm == "all-heads"
        yield _norm(spec, prefix + "self_attn.q_norm.weight", query if whole else spec.head_dim)
        yield _norm(spec, prefix + "self_attn.k_norm.weight", key_value if whole else spec.head_dim)
    attention = {"self_attn.q_proj": query, "self_attn.k_proj": key_value, "self_attn.v_proj": key_value}
    yield from _projections(spec, prefix, attention, hidden, "self_attn.qkv_proj" if spec.fused else None)
    yield from _projections(spec, prefix, {"self_attn.o_proj": hidden}, query, gain=spec.residual_gain)
    gates = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    yield from _projections(spec, prefix, gates, hidden, "mlp.gate_up_proj" if spec.fused else None)
    yield from _projections(spec, prefix, {"mlp.down_proj": hidden}, inner, gain=spec.residual_gain)


def _norms(spec: DecoderSpec) -> tuple[str, ...]:
    """The norms of the residual and of the outputs added to it, by Hugging Face's names.

    `post_attention_layernorm` normalizes the output of attention if there are post-norms, else the input of the
    feed-forward.
    """
    post = ("post_attention_layernorm", "post_feedforward_layernorm")
    if not spec.post_norms:
        return ("input_layernorm", "post_attention_layernorm")
    if not spec.pre_norms:
        return post
    return ("input_layernorm", post[0], "pre_feedforward_layernorm", post[1])


def _norm(spec: DecoderSpec, name: str, width: int) -> View:
    return View(name, (width,), name, width, offset=spec.norm_offset)


def _projections(
    spec: DecoderSpec,
    prefix: str,
    widths: dict[str, int],
    width_in: int,
    fused: str | None = None,
    gain: float = 1.0,
) -> Iterator[View]:
    """Matrices `[out, in]` and biases `[out]` of projections by their output widths; `fused` stores them as one."""
    total, first = sum(widths.values()), 0
    for part, width in widths.items():
        stored, rows = (fused, total) if fused else (part, width)
        yield View(f"{prefix}{part}.weight", (width, width_in), f"{prefix}{stored}.weight", rows, first, gain=gain)
        if part in spec.biased:
            yield View(f"{prefix}{part}.bias", (width,), f"{prefix}{stored}.bias", rows, first, gain=gain)
        first += width if fused else 0


def matrices(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """`[out, in]` of every matrix that multiplies activations, by name."""
    found = {}
    for view in views(spec):
        if len(view.shape) == 2 and view.name != EMBEDDING:
            rows, inputs = view.shape
            found[view.name] = rows, inputs
    return found


_PREFIXES = (("language_model.model.", "model."), ("language_model.", ""), ("model.language_model.", "model."))
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_tensor(stored: str) -> str | None:
    """The name that a tensor of a multimodal checkpoint has in a checkpoint of its text model alone.

    Args:
        stored: its name, in the older form (`language_model.model.layers...`) or the newer one
            (`model.language_model.layers...`).

    Returns:
        the name, or None for a tensor of the vision model, which text does not need.
    """
    if stored.startswith(_VISION):
        return None
    for prefix, plain in _PREFIXES:
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored
