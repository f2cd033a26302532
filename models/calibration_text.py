"""Make the default calibration text: prose of many kinds, and openings of Python modules, none held out.

python models/calibration_text.py > exporters/quantize/calibration.txt
"""

from __future__ import annotations

from pathlib import Path

from corpus import training_documents

PROSE = Path(__file__).with_name("prose.txt")
CHARACTERS = 420


def main() -> None:
    """Print the pieces of prose, an opening after every second; the modules are evenly spaced through the corpus."""
    pieces = PROSE.read_text("utf-8").strip().split("\n\n\n")
    code = [text for text in training_documents() if "import" in text and "def " in text]
    code = code[:: 2 * len(code) // len(pieces)]
    pairs = zip(pieces[::2], pieces[1::2], code, strict=False)
    print("\n\n\n".join(part for one, other, text in pairs for part in (one, other, _opening(text))))


def _opening(text: str) -> str:
    """The first lines from the first import on, past comments and licences."""
    return text[text.index("import") :][:CHARACTERS].rsplit("\n", 1)[0].rstrip()


if __name__ == "__main__":
    main()
