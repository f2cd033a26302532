"""Pictures as SVG: strips of memory, boxes, arrows and labels, on a panel that is legible on any page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

CELL = 24
_STYLE = """
.panel{fill:#ffffff;stroke:#d0d7de}.label{fill:#1f2328}.faint{fill:#59636e}.title{fill:#1f2328;font-weight:600}
.line{stroke:#59636e;fill:none}.head{fill:#59636e}.edge{stroke:#59636e}
.past{fill:#a9cdf7}.new{fill:#ffc680}.free{fill:#eaeef2}.sink{fill:#d8b9f8}.weights{fill:#a6e3b3}.bad{fill:#ffb3ad}
.box{fill:#f6f8fa}.on{fill:#1f2328}
@media (prefers-color-scheme:dark){
.panel{fill:#161b22;stroke:#3d444d}.label,.title{fill:#e6edf3}.faint{fill:#9198a1}.line{stroke:#9198a1}.head{fill:#9198a1}
.edge{stroke:#9198a1}.past{fill:#1f4f8f}.new{fill:#8a5106}.free{fill:#2a313c}.sink{fill:#5d3a8c}.weights{fill:#1d6b34}
.bad{fill:#8e2a25}.box{fill:#21262d}.on{fill:#f0f6fc}}
"""


class Drawing:
    """A picture of a size, to which shapes are added from top to bottom.

    Kinds of shapes are colours: `past`, `new`, `free`, `sink`, `weights`, `bad` and `box`.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="13">'
            f"<title>{escape(title)}</title><style>{_STYLE.replace(chr(10), '')}</style>"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
            f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
        )
        self._shapes: list[str] = []

    def note(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        """A remark, smaller and fainter than a label."""
        self.text(x, y, text, "faint", anchor=anchor, size=12)

    def text(
        self, x: float, y: float, text: str, kind: str = "label", *, anchor: str = "start", size: int = 13
    ) -> None:
        self._shapes.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """A rectangle with lines of text in its middle, the first of them strong if there are several."""
        self._shapes.append(
            f'<rect class="{kind} edge" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
        )
        top = y + height / 2 + 4.5 - 8.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            strong = "title" if number == 0 and len(lines) > 1 else "on"
            self.text(x + width / 2, top + 17 * number, line, strong, anchor="middle", size=13 if not number else 12)

    def cells(
        self, x: float, y: float, kinds: Iterable[str], labels: Iterable[str] = (), *, width: float = CELL
    ) -> None:
        """A strip of memory, a cell for each row."""
        names = [*labels]
        for number, kind in enumerate(kinds):
            self.box(x + number * width, y, width, CELL, kind, *names[number : number + 1])

    def line(self, *points: tuple[float, float], arrow: bool = True, dashed: bool = False) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        tip = ' marker-end="url(#tip)"' * arrow + ' stroke-dasharray="4 3"' * dashed
        self._shapes.append(f'<path class="line" d="{path}"{tip}/>')

    def bracket(self, left: float, right: float, y: float, text: str, *, below: bool = True) -> None:
        """A bracket over or under a part of a strip, with what it is."""
        inner = y + (6 if below else -6)
        self.line((left, y), (left, inner), (right, inner), (right, y), arrow=False)
        self.note((left + right) / 2, inner + (15 if below else -6), text, anchor="middle")

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        for kind, text in entries:
            self.box(x, y - 11, 13, 13, kind)
            self.note(x + 19, y, text)
            x += 36 + 6.6 * len(text)

    def __str__(self) -> str:
        return f"{self._head}{''.join(self._shapes)}</svg>\n"
