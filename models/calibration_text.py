"""Make the calibration text that ships with the exporters: help topics and module openings, none held out.

python models/calibration_text.py > exporters/quantize/calibration.txt
"""

from __future__ import annotations

from itertools import zip_longest

from corpus import training_documents

DOCUMENTS = 12
CHARACTERS = 1800


def main() -> None:
    """Print openings of help topics and of modules in turn, evenly spaced through the corpus."""
    documents = list(training_documents())
    code = [text for text in documents if "import" in text and "def " in text]
    prose = [text for text in documents if "import" not in text and len(text) > CHARACTERS]
    chosen = zip_longest(*(group[:: max(1, len(group) // DOCUMENTS)][:DOCUMENTS] for group in (prose, code)))
    print("\n\n".join(text[:CHARACTERS].rsplit("\n", 1)[0] for pair in chosen for text in pair if text))


if __name__ == "__main__":
    main()
