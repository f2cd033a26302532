"""Pictures of one shape in one colour above a number of two digits, and what they show, in words."""

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
_LINES = (  # of a digit, 3 pixels wide: a bit for each
    (7, 5, 5, 5, 7), (2, 6, 2, 2, 7), (7, 1, 7, 4, 7), (7, 1, 7, 1, 7), (5, 5, 7, 1, 1),
    (7, 4, 7, 1, 7), (7, 4, 7, 5, 7), (7, 1, 2, 2, 2), (7, 5, 7, 5, 7), (7, 5, 7, 1, 7),
)  # fmt: skip
_SCALE, _BAND = 3, 20
"""Pixels of the screen for one of a digit, and of the part of a picture below a shape."""


def drawn(number: int) -> tuple[NDArray[np.uint8], str]:
    """A picture `[64, 64, 3]` and its words, the same for the same number."""
    random = np.random.default_rng([7, number])
    y, x = np.mgrid[0:EDGE, 0:EDGE].astype(np.float32)
    dark = random.integers(0, 70, (2, 3))
    picture = dark[0] + (x[..., None] / EDGE) * (dark[1] - dark[0])
    size = random.uniform(9, 18)
    across, down = (
        (x - random.uniform(size, EDGE - size)) / size,
        (y - random.uniform(size, EDGE - _BAND - size)) / size,
    )
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
    number = random.integers(100)
    ink = np.concatenate([_digit(number // 10), np.zeros((5, 1), bool), _digit(number % 10)], axis=1)
    ink = ink.repeat(_SCALE, axis=0).repeat(_SCALE, axis=1)
    top, left = EDGE - _BAND + random.integers(_BAND - len(ink)), random.integers(EDGE - ink.shape[1])
    picture[top : top + len(ink), left : left + ink.shape[1]][ink] = random.integers(180, 256)
    picture += random.normal(0, 4, picture.shape)
    return picture.clip(0, 255).astype(np.uint8), f"a {colour} {shape} {number:02d}"


def _digit(value: int) -> NDArray[np.bool_]:
    """`[5, 3]`."""
    return np.array([[line >> (2 - column) & 1 for column in range(3)] for line in _LINES[value]], bool)
