"""python -m docs.drawings: draw every picture of the documentation into docs/images."""

from __future__ import annotations

from pathlib import Path

from docs.drawings.concepts import ALL

IMAGES = Path(__file__).parent.parent / "images"

for draw in ALL:
    file = IMAGES / f"{draw.__name__.replace('_', '-')}.svg"
    file.write_text(str(draw()), "utf-8")
    print(file.name)
