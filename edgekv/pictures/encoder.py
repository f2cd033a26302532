"""The vision encoder of a bundle on an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.errors import EngineError, UsageError
from edgekv.kv.memory import aligned_zeros
from edgekv.pictures.patches import encoder_inputs, graph_inputs
from edgekv.runtime.binding import Binding
from edgekv.runtime.engine import open_encoder
from edgekv.spec import ROWS_PORT, EncoderSpec
from quant import DTYPES

if TYPE_CHECKING:
    from edgekv.runtime import Engine


class PictureEncoder:
    """Turns tiles into rows of embeddings. The graph is loaded when the first tile is encoded."""

    def __init__(self, bundle: Bundle, engine: Engine) -> None:
        """Args: bundle: has an encoder. engine: runs it."""
        vision = bundle.manifest.vision
        assert vision is not None, "a bundle with an encoder"
        self._vision = vision
        self._file = bundle.path / vision.file
        self._engine = engine
        self._embedding = bundle.manifest.encodings["embedding"]
        self._binding: Binding | None = None
        self._is_closed = False
        self._inputs: dict[str, NDArray[Any]] = {}
        self._rows = np.zeros(0)

    @property
    def spec(self) -> EncoderSpec:
        """The encoder."""
        return self._vision.encoder

    def close(self) -> None:
        """Free the graph; a later tile is refused."""
        self._binding, self._is_closed = None, True
        self._inputs.clear()
        self._rows = np.zeros(0)

    def encode(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """The rows of a tile `[height, width, 3]` as decoders read embeddings, `[rows, hidden]`.

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
        height, width = pixels.shape[:2]
        integers = self._rows[0, 0, : vision.encoder.rows_of(width, height)]
        rows: NDArray[Any] = vision.encodings[ROWS_PORT].dequantize(integers)
        return self._embedding.quantize(rows)

    def _bound(self) -> Binding:
        spec, encodings = self.spec, self._vision.encodings
        binding = open_encoder(self._engine, self._file)
        rows = DTYPES[encodings[ROWS_PORT].dtype]
        self._rows = aligned_zeros((1, 1, spec.rows, spec.output), rows.name)
        for name, shape in spec.input_shapes.items():
            dtype = DTYPES[encodings[name].dtype]
            self._inputs[name] = values = aligned_zeros(shape, dtype.name)
            binding.inputs([name], dtype, shape, [values.ctypes.data])
        binding.outputs([ROWS_PORT], rows, self._rows.shape, [self._rows.ctypes.data])
        return binding
