"""Types that several threads decode first."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

_RACE = """
import threading, time
import msgspec, msgspec._utils
from edgekv.machine.decoding import DECODERS, convert

real = msgspec._utils._get_class_mro_and_typevar_mappings

def slow(kind):  # other threads run while a type is analysed
    time.sleep(0.01)
    return real(kind)

msgspec._utils._get_class_mro_and_typevar_mappings = slow

class Part(msgspec.Struct):
    number: int

class Whole(msgspec.Struct):
    part: Part | None
    parts: list[Part]
    text: str

values = {"part": {"number": 1}, "parts": [{"number": 2}], "text": "x"}
body, found = msgspec.json.encode(values), []

def decode(after_s, kind):
    time.sleep(after_s)
    found.append(convert(values, kind) if after_s else DECODERS[kind].decode(body))

threads = [threading.Thread(target=decode, args=(0.003 * number, Whole)) for number in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [Whole(Part(1), [Part(2)], "x")] * 12
"""


def test_threads_may_decode_a_type_for_the_first_time_together() -> None:
    """msgspec alone ends the process with SIGSEGV then."""
    done = subprocess.run([sys.executable, "-c", _RACE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def _decodes_alone(call: ast.Call) -> bool:
    """Whether a call of msgspec decodes by a type that nothing has analysed."""
    called, kinds = ast.unparse(call.func), [each.value for each in call.keywords if each.arg == "type"]
    if called in ("msgspec.json.decode", "msgspec.msgpack.decode"):
        return any(not ast.unparse(kind).startswith("analysed(") for kind in kinds)
    return called in ("msgspec.convert", "msgspec.json.Decoder", "msgspec.msgpack.Decoder")


def test_every_module_decodes_by_types_that_are_analysed_under_the_lock() -> None:
    """Workers of a cluster may have several threads, as a server has: no module knows in how many it runs.

    Reports of devices have a decoder that is made when their module is imported, which Python does under a lock.
    """
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in ("devices", "edgekv", "exporters", "quant")
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and _decodes_alone(node)
    ]
    assert {place.partition(":")[0] for place in found} == {"edgekv/machine/decoding.py", "devices/report.py"}
