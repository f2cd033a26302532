"""The vision encoder of a bundle on an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.errors import EngineError, UsageError
from edgekv.kv.memory import aligned_zeros
from edgekv.pictures.patches import encoder_inputs, graph_inputs
from edgekv.runtime.binding import Binding
from edgekv.runtime.engine import open_encoder
from edgekv.spec import LAYER_INPUTS_PORT, EncoderSpec
from quant import DTYPES

if TYPE_CHECKING:
    from edgekv.runtime import Engine


class EncodedRows(NamedTuple):
    """What an encoder gives of a tile, as decoders read it.

    Attributes:
        embeddings: `[rows, hidden]`.
        behind: what layers of the decoder read of each row, or add behind them, `[rows, ...]`; None for neither.
    """

    embeddings: NDArray[Any]
    behind: NDArray[Any] | None


class PictureEncoder:
    """Turns tiles into rows of embeddings. The graph is loaded when the first tile is encoded."""

    def __init__(self, bundle: Bundle, engine: Engine) -> None:
        """Args: bundle: has an encoder. engine: runs it."""
        vision = bundle.manifest.vision
        assert vision is not None, "a bundle with an encoder"
        self._vision = vision
        self._file = bundle.path / vision.file
        self._engine = engine
        encodings = bundle.manifest.encodings
        self._embedding, self._behind = encodings["embedding"], encodings.get(LAYER_INPUTS_PORT)
        self._binding: Binding | None = None
        self._is_closed = False
        self._inputs: dict[str, NDArray[Any]] = {}
        self._outputs: dict[str, NDArray[Any]] = {}

    @property
    def spec(self) -> EncoderSpec:
        """The encoder."""
        return self._vision.encoder

    def close(self) -> None:
        """Free the graph; a later tile is refused."""
        self._binding, self._is_closed = None, True
        self._inputs.clear()
        self._outputs.clear()

    def encode(self, pixels: NDArray[np.uint8]) -> EncodedRows:
        """The rows of a tile `[height, width, 3]`.

        Raises:
            EngineError: the engine has no encoders, refused the graph, or failed.
            UsageError: it was closed.
        """
        if self._is_closed:
            raise UsageError("model", got="a closed model", expected="an open one", fix="Load the bundle again.")
        vision = self._vision
        if self._binding is None:
            self._binding = self._bound()
        inputs = encoder_inputs(pixels, vision.encoder, vision.pictures)
        for name, values in graph_inputs(inputs, vision.encoder, vision.encodings).items():
            self._inputs[name][:] = values
        try:
            self._binding.run()
        except Exception as error:  # the runtimes' exceptions have no common base
            got = " ".join(str(error).split())
            fix = "Try another --engine; if it runs there, report this graph."
            raise EngineError(f"running {vision.file}", got=got, expected="a picture's rows", fix=fix) from None
        rows = inputs.output_rows(vision.encoder)
        first, *more = (vision.encodings[port].dequantize(values[0, 0, rows]) for port, values in self._outputs.items())
        behind = None
        if more:
            assert self._behind is not None, "a decoder whose layers read rows of pictures"
            behind = self._behind.quantize(np.concatenate(more, axis=1))
        return EncodedRows(self._embedding.quantize(first), behind)

    def _bound(self) -> Binding:
        spec, encodings = self.spec, self._vision.encodings
        binding = open_encoder(self._engine, self._file)
        for name, shape in spec.input_shapes.items():
            dtype = DTYPES[encodings[name].dtype]
            self._inputs[name] = values = aligned_zeros(shape, dtype.name)
            binding.inputs([name], dtype, shape, [values.ctypes.data])
        for name, shape in spec.outputs.items():
            dtype = DTYPES[encodings[name].dtype]
            self._outputs[name] = values = aligned_zeros(shape, dtype.name)
            binding.outputs([name], dtype, shape, [values.ctypes.data])
        return binding
