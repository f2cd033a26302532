"""The tests that run on Arm64 under qemu, file by file, for `sh tests/platforms/arm64.sh suite`.

python -m tests.platforms.arm64_suite PYTHON RESULTS.jsonl [FILE ...]

Each file is a process of its own, first on this machine, which makes the exports that tests share: under qemu they
would take hours. Counts are added to RESULTS.jsonl, and a later run continues there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.support.exports import GIVEN, platform_folder

SELECT = "not htp and not slow and not numpy2 and not numpy1"
LONGEST_S = 3600
ELSEWHERE = (
    *("aihub", "android", "chat_markdown", "chat_page", "docs", "doctor", "genai"),
    *("genie", "htp", "imports", "litert", "render", "tflite"),
)
"""Begin the names of files that need other runtimes, a browser, or a platform's tools, which this one does not have."""
GROUPS = {
    "KV cache": ("kv_", "cache", "row_table", "shared_rows", "arena", "policies", "paged", "size"),
    "prefixes": ("prefix", "reuse"),
    "sessions": ("session", "sequences", "saved_sequence", "slots", "scheduler", "batch", "threads", "windows"),
    "generation": (
        *("beam", "chat", "draft", "generat", "golden", "gramm", "param", "process", "sampl", "spec", "text", "tool"),
    ),
    "bundles": ("bundle", "atomic", "compile", "bad_input", "guard", "system", "vendor", "device"),
}
OTHERS = "the rest"


class Result(msgspec.Struct, frozen=True):
    """What became of the tests of a file; `failures` are their names."""

    file: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[str]


def group(file: str) -> str:
    """The group of a file: the first that has the beginning of its name."""
    name = Path(file).stem.removeprefix("test_")
    return next((group for group, begins in GROUPS.items() if name.startswith(begins)), OTHERS)


def run(python: str, file: Path) -> Result:
    """Run the tests of one file with this Python, after they ran with the one of this process."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", SELECT, "-rfE", "--tb=short", str(file)]
    environment = os.environ | {GIVEN: platform_folder().name}
    subprocess.run([sys.executable, *command[1:]], capture_output=True, env=environment, check=False)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        output, code = f"FAILED {file}::longer than {LONGEST_S} s", 1
    last = output.strip().splitlines()[-1] if output.strip() else ""
    counts = Counter({kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)})
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if code not in (0, 5) and not failures:  # 5: none of its tests is selected
        failures = [f"{file}: exit status {code}"]
    if failures:
        file_log = Path("build", "arm64", f"{file.stem}.log")
        file_log.write_text(output)
    seconds = re.search(r"in ([\d.]+)s", last)
    return Result(
        str(file),
        counts["passed"],
        max(counts["failed"] + counts["error"], len(failures)),
        counts["skipped"],
        float(seconds[1]) if seconds else 0.0,
        failures,
    )


def table(results: list[Result]) -> str:
    """Counts by group, and the names of what failed."""
    lines = ["| | files | passed | failed | skipped |", "|---|---|---|---|---|"]
    for name in (*GROUPS, OTHERS):
        of = [each for each in results if group(each.file) == name]
        counts = (len(of), *(sum(getattr(each, kind) for each in of) for kind in ("passed", "failed", "skipped")))
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join([*lines, *(failure for each in results for failure in each.failures)])


def every_file() -> list[Path]:
    """The files of the suite, group by group."""
    files = [file for file in sorted(Path("tests").rglob("test_*.py")) if not file.stem[5:].startswith(ELSEWHERE)]
    return sorted(files, key=lambda file: ([*GROUPS, OTHERS].index(group(file.name)), file.name))


def main(python: str, results: Path, files: Sequence[Path]) -> int:
    """Run those of the files that have no result yet, in this order, and print the table; 1 if a test failed."""
    found = (
        [msgspec.json.decode(line, type=Result) for line in results.read_bytes().splitlines()]
        if results.exists()
        else []
    )
    done = {each.file for each in found}
    for file in files or every_file():
        if str(file) in done:
            continue
        result = run(python, file)
        with results.open("ab") as lines:
            lines.write(msgspec.json.encode(result) + b"\n")
        print(f"{file}: {result.passed} passed, {result.failed} failed, {result.skipped} skipped", flush=True)
        found.append(result)
    print(table(found))
    return int(any(each.failed for each in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), [Path(file) for file in sys.argv[3:]]))
