"""A stand-in for the program qnn-net-run, on the emulator of this machine.

The file `kit` in the phone's folder names the kit, whose wrappers tell ONNX Runtime what is in a binary.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

STORAGE = "/data/local/tmp"


def here(path: str) -> Path:
    """A path of the phone, as it is here."""
    return Path(path if path.startswith(os.environ["ADB_PHONE"]) else f"{os.environ['ADB_PHONE']}/root{path}")


def main(arguments: list[str]) -> None:
    flags = {"--use_native_input_files", "--use_native_output_files"}
    assert flags <= set(arguments)
    pairs = [each for each in arguments if each not in flags]
    options = dict(zip(pairs[::2], pairs[1::2], strict=True))
    binary = here(options["--retrieve_context"])
    libraries = Path(sys.argv[0]).parent
    if "LD_LIBRARY_PATH" in os.environ:  # the phone's libraries, which are not for here
        assert os.environ.pop("LD_LIBRARY_PATH") == str(libraries)
        assert os.environ.pop("ADSP_LIBRARY_PATH").startswith(f"{libraries}/dsp;")
        assert Path(options["--backend"]).is_file() and Path(options["--backend"]).parent == libraries
        os.execv(sys.executable, [sys.executable, *sys.argv])
    run(
        binary,
        Path(Path(os.environ["ADB_PHONE"], "kit").read_text()),
        Path(options["--input_list"]),
        Path(options["--output_dir"]),
    )


def run(binary: Path, kit: Path, listed: Path, output: Path) -> None:
    from devices import find
    from edgekv.qnn.provider import create_session

    known = next(kit.rglob(f"{binary.name}*"))  # it may be compressed there
    wrapper = known.with_name(f"{binary.name.removesuffix('_qnn.bin')}.onnx")
    soc = json.loads((kit / "kit.json").read_text())["soc"]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(wrapper, Path(folder, wrapper.name))
        Path(folder, binary.name).symlink_to(binary)
        session = create_session(Path(folder, wrapper.name), find(soc))
        for number, line in enumerate(listed.read_text().splitlines()):
            files = dict(each.split(":=") for each in line.split())
            feeds = {}
            for port in session.get_inputs():
                dtype = np.dtype(port.type.removeprefix("tensor(").rstrip(")"))
                feeds[port.name] = np.fromfile(here(files.pop(port.name)), dtype).reshape(port.shape)
            assert not files, "an input that the graph does not have"
            names = [port.name for port in session.get_outputs()]
            results = output / f"Result_{number}"
            results.mkdir(parents=True)
            for name, values in zip(names, session.run(names, feeds), strict=True):
                values.tofile(results / f"{name.replace('/', '_')}_native.raw")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
