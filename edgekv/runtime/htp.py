"""Qualcomm's HTP: the emulator on x86, the NPU on a Snapdragon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import onnxruntime as ort

from devices import Device, find
from edgekv.bundle import Bundle, GraphFormat, open_compiled
from edgekv.errors import UsageError
from edgekv.qnn import check_libraries, compiler, create_session
from edgekv.runtime.binding import Binding, MemoryBinding
from edgekv.runtime.htp_options import HtpOptions
from edgekv.runtime.row_bits import RowBits
from edgekv.vendor_libraries import Platform

_SHARE = "ep.share_ep_contexts"
_SHARES_FROM = 73
_DEFAULT = HtpOptions()


@dataclass(frozen=True, slots=True)
class HtpEngine:
    """Qualcomm's HTP: the emulator on x86, the NPU on a Snapdragon.

    Attributes:
        device: the target.
        options: of the provider.
        compiled: wrappers of context binaries, by the graphs that they were compiled from; other graphs are compiled
            when they are loaded.
        shares_weights: whether the binaries contain several graphs each. The provider then loads a binary once, for the
            sessions of all its graphs.
    """

    graph_format: ClassVar[GraphFormat] = "onnx"

    device: Device
    compiled: Mapping[Path, Path] = field(default_factory=dict)
    shares_weights: bool = False
    options: HtpOptions = _DEFAULT
    name: Literal["htp"] = "htp"
    _sessions: dict[Path, ort.InferenceSession] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None) -> HtpEngine:
        if threads is not None:
            raise UsageError("threads", got=threads, expected="none with the engine htp", fix="Leave it out.")
        device = find(bundle.manifest.device)
        check_libraries(device)
        return cls.on(device, bundle)

    @classmethod
    def on(cls, device: Device, bundle: Bundle) -> HtpEngine:
        """An engine for a device that loads what the bundle was compiled to for it.

        Raises:
            EngineError: the compiler is not installed.
            BundleError: a compiled binary was changed.
        """
        # The emulator cannot load binaries of several graphs, and V68 and V69 are not known to share weights.
        kinds = (True, False) if Platform.here().has_npu and device.arch >= _SHARES_FROM else (False,)
        for is_shared in kinds:
            if found := _wrappers(bundle, device, is_shared=is_shared):
                return cls(device, found, shares_weights=is_shared)
        return cls(device)

    def with_options(self, options: HtpOptions) -> HtpEngine:
        """An engine with other options.

        Raises:
            UsageError: the chip or this machine does not have them, or they are for compiling graphs that are compiled.
        """
        options.check(self.device, Platform.here())
        if options.is_for_compiling and self.compiled:
            raise UsageError(
                "htp vtcm, optimization",
                got="one of them for compiled binaries",
                expected="neither: binaries keep what they were compiled for",
                fix="Give it to edgekv compile, with --force.",
            )
        return replace(self, options=options)

    @property
    def row_bits(self) -> RowBits:
        """`equal`: sums are of integers."""
        return "equal"

    @property
    def alignment_bytes(self) -> int:
        return 1

    def load(self, file: Path, name: str) -> Binding:
        if file not in self._sessions:
            self._sessions[file] = self.session(file)
        return MemoryBinding(self._sessions[file])

    def session(self, graph: Path) -> ort.InferenceSession:
        """A session of an ONNX file, or of the binary that it was compiled to.

        Raises:
            EngineError: the runtime is missing or refused the graph.
        """
        return create_session(
            self.compiled.get(graph, graph),
            self.device,
            session_config={_SHARE: "1"} if self.shares_weights else {},
            provider_options=self.options.provider_options,
        )


def _wrappers(bundle: Bundle, device: Device, *, is_shared: bool = False) -> Mapping[Path, Path]:
    compiled = open_compiled(bundle, device.soc, compiler())
    if compiled is None:
        return {}
    found = {bundle.part_path(part): compiled.wrapper(part.name, is_shared=is_shared) for part in bundle.manifest.parts}
    return {part: wrapper for part, wrapper in found.items() if wrapper is not None}
