"""The command has BLAS compute with the widest instructions of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgekv.machine.blas import VARIABLE, kernels_for, use_fastest_kernels

_AVX2 = "fpu sse4_2 avx avx2 fma"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [(_AVX512, "SkylakeX"), (_AVX2, "Haswell"), (f"{_AVX2} avx512f", "Haswell"), ("fpu sse4_2 avx", None)],
)
def test_kernels_are_those_whose_instructions_the_processor_has(flags: str, kernels: str | None) -> None:
    assert kernels_for(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: avx512f\n\nflags\t\t: fpu\n") == kernels


def test_kernels_that_somebody_chose_are_kept() -> None:
    environment = {VARIABLE: "Zen"}
    use_fastest_kernels(environment)
    assert environment == {VARIABLE: "Zen"}


@pytest.mark.numpy1
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list instructions in a file")
def test_the_command_names_them_before_numpy_is_there() -> None:
    wanted = kernels_for(Path("/proc/cpuinfo").read_text("ascii", "replace"))
    if wanted is None:
        pytest.skip("this processor has neither AVX-512 nor AVX2")
    code = (
        "import sys, edgekv.cli.app as app\n"
        "app.main = lambda: print(__import__('os').environ['OPENBLAS_CORETYPE'], 'numpy' in sys.modules)\n"
        "import edgekv.cli; edgekv.cli.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [wanted, "False"]
