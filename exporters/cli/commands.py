"""The commands of this package; see `edgekv.cli.commands`."""

from __future__ import annotations

from edgekv.cli.commands import DEVICES, KEPT, MEASURE, RUN, RUNTIMES, START, Entry

_EXPORT = "export"

COMMANDS = (
    Entry(
        "bundle",
        "exporters.targets.cli:bundle",
        "Write a bundle as the files that another runtime loads.",
        _EXPORT,
        group=RUNTIMES,
    ),
    Entry("compare", "exporters.compare.cli:compare_", "Compare two models on one text.", _EXPORT, group=MEASURE),
    Entry(
        "compile",
        "exporters.cli.compile:compile_",
        "Compile a bundle to context binaries for a chip.",
        _EXPORT,
        group=RUN,
    ),
    Entry(
        "conformance",
        "exporters.conformance.cli:conformance",
        "Make a kit of graphs with expected integers, run it on a device, and show its report.",
        group=DEVICES,
    ),
    Entry(
        "diff",
        "exporters.cli.trace:diff",
        "Find the first result in which two traces differ, and why.",
        _EXPORT,
        group=MEASURE,
    ),
    Entry(
        "estimate",
        "exporters.cli.estimate:estimate",
        "Estimate the speed of a bundle on a chip, by the HTP compiler's simulation.",
        _EXPORT,
        group=MEASURE,
    ),
    Entry(
        "eval",
        "exporters.cli.evaluate:eval_",
        "Compare a bundle with the float32 reference of its checkpoint.",
        _EXPORT,
        group=MEASURE,
    ),
    Entry(
        "export",
        "exporters.cli.export:export",
        "Export a checkpoint as a bundle of static integer graphs.",
        _EXPORT,
        group=START,
    ),
    Entry("genai", "exporters.targets.cli:genai", "Run a folder of `edgekv bundle genai`.", _EXPORT, group=RUNTIMES),
    Entry(
        "genie",
        "exporters.targets.cli:genie",
        "Run a folder of `edgekv bundle genie` in Genie.",
        _EXPORT,
        group=RUNTIMES,
    ),
    Entry(
        "hub",
        "exporters.targets.aihub.cli:hub",
        "Run a bundle on devices that Qualcomm AI Hub hosts.",
        _EXPORT,
        group=DEVICES,
    ),
    Entry(
        "lora", "exporters.cli.lora:lora", "Add, list and remove adapters of a bundle with slots.", _EXPORT, group=RUN
    ),
    Entry(
        "pieces",
        "exporters.cli.pieces:pieces",
        "List or remove the results of interrupted exports.",
        _EXPORT,
        group=KEPT,
    ),
    Entry(
        "push",
        "exporters.targets.android.cli:push",
        "Copy a folder to an Android phone over adb.",
        _EXPORT,
        group=DEVICES,
    ),
    Entry("run", "exporters.targets.android.cli:run", "Continue a prompt in Genie on a phone.", _EXPORT, group=DEVICES),
    Entry(
        "sweep",
        "exporters.sweep.cli:sweep",
        "Export, compile and evaluate every combination of recipe, cache, chip and context.",
        "sweep",
        group=MEASURE,
    ),
    Entry(
        "trace",
        "exporters.cli.trace:trace",
        "Write every intermediate result of the decoder for a text.",
        _EXPORT,
        group=MEASURE,
    ),
)
