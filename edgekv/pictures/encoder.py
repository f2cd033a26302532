"""The vision encoder of a bundle on an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.errors import EngineError, UsageError
from edgekv.kv.memory import aligned_zeros
from edgekv.pictures.patches import patches_of
from edgekv.runtime.binding import Binding
from edgekv.runtime.engine import open_encoder
from edgekv.spec import PIXELS_PORT, ROWS_PORT, EncoderSpec
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
        self._pixels = self._rows = np.zeros(0)

    @property
    def spec(self) -> EncoderSpec:
        """The encoder."""
        return self._vision.encoder

    def close(self) -> None:
        """Free the graph; a later tile is refused."""
        self._binding, self._is_closed = None, True
        self._pixels = self._rows = np.zeros(0)

    def encode(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """The rows of a tile `[image, image, 3]` as decoders read embeddings, `[rows, hidden]`.

        Raises:
            EngineError: the engine has no encoders, refused the graph, or failed.
            UsageError: it was closed.
        """
        if self._is_closed:
            raise UsageError("model", got="a closed model", expected="an open one", fix="Load the bundle again.")
        vision = self._vision
        if self._binding is None:
            self._binding = self._bound()
        patches = patches_of(pixels, vision.encoder, vision.pictures)
        self._pixels[0, 0] = vision.encodings[PIXELS_PORT].quantize(patches)
        try:
            self._binding.run()
        except Exception as error:  # the runtimes' exceptions have no common base
            found = " ".join(str(error).split())
            fix = "Try another --engine; if it runs there, report this graph."
            raise EngineError(f"running {vision.file}", got=found, expected="a picture's rows", fix=fix) from None
        rows: NDArray[Any] = vision.encodings[ROWS_PORT].dequantize(self._rows[0, 0])
        return self._embedding.quantize(rows)

    def _bound(self) -> Binding:
        spec, encodings = self.spec, self._vision.encodings
        binding = open_encoder(self._engine, self._file)
        pixels, rows = (DTYPES[encodings[name].dtype] for name in (PIXELS_PORT, ROWS_PORT))
        self._pixels = aligned_zeros((1, 1, spec.inputs, spec.patch_values), pixels.name)
        self._rows = aligned_zeros((1, 1, spec.rows, spec.output), rows.name)
        binding.inputs([PIXELS_PORT], pixels, self._pixels.shape, [self._pixels.ctypes.data])
        binding.outputs([ROWS_PORT], rows, self._rows.shape, [self._rows.ctypes.data])
        return binding
