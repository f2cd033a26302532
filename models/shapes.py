"""Pictures of one shape in one colour, and what they show, in words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EDGE = 64
QUESTION = "What?"
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
    "white": (240, 240, 240),
    "pink": (240, 120, 200),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")


def drawn(number: int) -> tuple[NDArray[np.uint8], str]:
    """A picture `[64, 64, 3]` and its words, the same for the same number."""
    random = np.random.default_rng([7, number])
    y, x = np.mgrid[0:EDGE, 0:EDGE].astype(np.float32)
    dark = random.integers(0, 70, (2, 3))
    picture = dark[0] + (x[..., None] / EDGE) * (dark[1] - dark[0])
    size = random.uniform(9, 18)
    across, down = (x - random.uniform(size, EDGE - size)) / size, (y - random.uniform(size, EDGE - size)) / size
    shape, colour = SHAPES[random.integers(len(SHAPES))], [*COLOURS][random.integers(len(COLOURS))]
    distance = np.hypot(across, down)
    inside = {
        "circle": distance < 1,
        "square": np.maximum(abs(across), abs(down)) < 0.9,
        "triangle": (down < 0.8) & (abs(across) * 1.7 < down + 0.9),
        "cross": (np.minimum(abs(across), abs(down)) < 0.28) & (np.maximum(abs(across), abs(down)) < 1),
        "ring": (distance < 1) & (distance > 0.55),
    }[shape]
    picture[inside] = np.array(COLOURS[colour]) + random.integers(-15, 16, 3)
    picture += random.normal(0, 4, picture.shape)
    return picture.clip(0, 255).astype(np.uint8), f"a {colour} {shape}"
