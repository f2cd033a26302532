"""Stand-ins for programs of a phone: genie-t2t-run and genie-app, on libGenie.so of this machine, and qnn-net-run.

The emulator loads no binary of several graphs, and its libraries are not the phone's: `emulator.json` in the phone's
folder names the folder that was pushed, whose binaries of single graphs are used, and the library. For qnn-net-run, the
file `kit` there names the kit, whose wrappers tell ONNX Runtime what is in a binary.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from pathlib import Path

STORAGE = "/data/local/tmp"
_OnText = CFUNCTYPE(None, c_char_p, c_int, c_void_p)
_Allocate = CFUNCTYPE(None, c_size_t, POINTER(c_void_p))
_SIGNATURES = {
    "GenieProfile_create": [c_void_p, POINTER(c_void_p)],
    "GenieProfile_getJsonData": [c_void_p, _Allocate, POINTER(c_char_p)],
    "GenieDialogConfig_createFromJson": [c_char_p, POINTER(c_void_p)],
    "GenieDialogConfig_bindProfiler": [c_void_p, c_void_p],
    "GenieDialog_create": [c_void_p, POINTER(c_void_p)],
    "GenieDialog_restore": [c_void_p, c_char_p],
    "GenieDialog_query": [c_void_p, c_char_p, c_int, _OnText, c_void_p],
    "GenieDialog_free": [c_void_p],
}


def here(path: str) -> Path:
    """A path of the phone, as it is here."""
    return Path(path if path.startswith(os.environ["ADB_PHONE"]) else f"{os.environ['ADB_PHONE']}/root{path}")


def read_text(path: Path) -> str:
    """A file, with paths of the phone as they are here."""
    return path.read_text().replace(STORAGE, str(here(STORAGE)))


class Genie:
    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._profile, self._config, self._dialog = c_void_p(), c_void_p(), c_void_p()

    def call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            print(f"{name}: status {status}")
            sys.exit(1)

    def create(self, config: Path, emulated: Path) -> None:
        """Load a configuration, with the binaries of single graphs of the folder here."""
        content, alone = (json.loads(read_text(each)) for each in (config, emulated / "genie_config.json"))
        binaries = alone["dialog"]["engine"]["model"]["binary"]["ctx-bins"]
        content["dialog"]["engine"]["model"]["binary"]["ctx-bins"] = [str(emulated / name) for name in binaries]
        self.call("GenieProfile_create", None, byref(self._profile))
        self.call("GenieDialogConfig_createFromJson", json.dumps(content).encode(), byref(self._config))
        self.call("GenieDialogConfig_bindProfiler", self._config, self._profile)
        self.call("GenieDialog_create", self._config, byref(self._dialog))

    def restore(self, folder: str) -> None:
        self.call("GenieDialog_restore", self._dialog, folder.encode())

    def query(self, prompt: bytes) -> str:
        pieces: list[bytes] = []
        take = _OnText(lambda text, code, data: pieces.append(text or b""))
        self.call("GenieDialog_query", self._dialog, prompt, 0, take, None)
        return b"".join(pieces).decode("utf-8", "replace")

    def save_profile(self, path: Path) -> None:
        held = []

        def allocate(size: int, given: ctypes._Pointer) -> None:
            held.append(create_string_buffer(size))
            given[0] = ctypes.cast(held[-1], c_void_p).value

        content = c_char_p()
        self.call("GenieProfile_getJsonData", self._profile, _Allocate(allocate), byref(content))
        path.write_bytes(content.value or b"")

    def free(self) -> None:
        self.call("GenieDialog_free", self._dialog)


def text_to_text(genie: Genie, emulated: Path, arguments: list[str]) -> None:
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    print("Using libGenie.so version 1.21.0\n", flush=True)
    genie.create(Path(options["-c"]), emulated)
    prompt = Path(options["--prompt_file"]).read_bytes()
    print(f"[PROMPT]: {prompt.decode()}\n\n[BEGIN]: ", end="", flush=True)
    print(f"{genie.query(prompt)}[END]\n")
    genie.save_profile(Path(options["--profile"]))
    genie.free()


def app(genie: Genie, emulated: Path, arguments: list[str]) -> None:
    option, script = arguments
    assert option == "-s"
    for line in read_text(Path(script)).splitlines():
        words, config = line.split(), Path(script).parent / "config.json"
        if words[:2] == ["dialog", "create"]:
            genie.create(config, emulated)
        elif words[:2] == ["dialog", "restore"]:
            genie.restore(words[3])
        elif words[:2] == ["dialog", "query"]:
            Path(words[4]).write_text(genie.query(Path(words[3]).read_bytes()))
        elif words[:2] == ["profile", "save"]:
            genie.save_profile(Path(words[3]))
        elif words[:2] == ["dialog", "free"]:
            genie.free()


def run_genie(name: str, arguments: list[str]) -> None:
    settings = json.loads(Path(os.environ["ADB_PHONE"], "emulator.json").read_text())
    library = Path(settings["library"])
    if os.environ.get("LD_LIBRARY_PATH") != str(library.parent):  # the phone's libraries, which are not for here
        os.environ["LD_LIBRARY_PATH"] = str(library.parent)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    run = {"genie-t2t-run": text_to_text, "genie-app": app}[name]
    run(Genie(settings["library"]), Path(settings["folder"]), arguments)
    sys.stdout.flush()
    os._exit(0)


def net_run(arguments: list[str]) -> None:
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
    run_graph(
        binary,
        Path(Path(os.environ["ADB_PHONE"], "kit").read_text()),
        Path(options["--input_list"]),
        Path(options["--output_dir"]),
    )


def run_graph(binary: Path, kit: Path, listed: Path, output: Path) -> None:
    import numpy as np

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
    NAME = Path(sys.argv[0]).name
    if NAME == "qnn-net-run":
        net_run(sys.argv[1:])
    else:
        run_genie(NAME, sys.argv[1:])
