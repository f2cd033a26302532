"""The name of a piece: it changes with every input, and with no other."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from devices import find
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import AdapterChoice
from exporters.lora.options import LoraOptions
from exporters.options import ExportOptions
from exporters.pipeline import piece as pieces
from exporters.pipeline.piece import Piece, Plan
from exporters.pipeline.pieces import CompileTflitePiece
from exporters.pipeline.place import Identity
from exporters.pipeline.planning import Planner
from exporters.pipeline.quality import MEASURED_TOKENS, ReferencePiece, Text
from exporters.plan import plan_export
from exporters.quantize.effort import Effort
from exporters.quantize.recipe import WeightRule, find_recipe
from exporters.quantize.sink_request import SinkRequest
from exporters.sweep.combination import Combination
from exporters.sweep.sweep import _add
from exporters.targets.aihub.run import PackPiece
from exporters.targets.aihub.sample import SamplePiece
from tests.support.checkpoints import NEWER, write_checkpoint
from tests.support.foreign_files import write_adapter

RECIPE = find_recipe("w4a16-lpbq32")
LAYERS = 3
COMPILER = "tested compiler 1.0"

QUANTIZED = {"layer 0", "layer 1", "layer 2", "head", "ranges adapter"}
BUNDLE = {"write", "check", "compile", "evaluate", "quality"}
ENCODED = {"encode prose", "encode swept"}
AFTER_SURVEY = {"text", *QUANTIZED, *BUNDLE, *ENCODED, "reference prose", "reference swept"}
SURVEYS = {"survey", "survey adapter"}
ALL = {*SURVEYS, *AFTER_SURVEY}


@dataclass
class Export:
    """What an export reads: files in a folder, and options."""

    folder: Path
    options: ExportOptions
    merged: tuple[AdapterChoice, ...] = ()
    text: Text = dataclasses.field(default_factory=lambda: Text("title", "some text " * 90, 100))

    @property
    def plan(self) -> Plan:
        checkpoint = Checkpoint.open(str(self.folder / "checkpoint"), self.merged)
        identity = Identity.of(checkpoint)
        planner = Planner(identity, swept=self.text)
        combination = Combination(self.options.recipe, "recipe", "u8", self.options.device, (64,))
        _add(planner, combination, plan_export(checkpoint, self.options), self.text)
        return planner.plan

    @property
    def names(self) -> dict[str, set[str]]:
        """The names of the pieces by kind, layers by number, and what is read of texts by the text."""
        found: dict[str, set[str]] = {}
        texts = dict[str, str]()
        pieces = {name: planned.piece for name, planned in self.plan.pieces.items()}
        for name, piece in pieces.items():
            if isinstance(piece, ReferencePiece):
                titles = [each.title if each.title in MEASURED_TOKENS else "swept" for each in piece.measured]
                texts |= {name: titles[0], **dict(zip((each.ids for each in piece.measured), titles, strict=True))}
        for name, piece in pieces.items():
            of = texts.get(name, getattr(piece, "layer", None))
            of = "adapter" if getattr(piece, "adapter", None) is not None else of
            found.setdefault(piece.kind if of is None else f"{piece.kind} {of}", set()).add(name)
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "checkpoint", NEWER | {"num_hidden_layers": LAYERS})
    (folder / "text.txt").write_text("def area(width, height):\n    return width * height\n" * 30)
    for number in range(2):
        write_adapter(folder / f"adapter{number}", folder / "checkpoint", seed=number)
    return folder


@pytest.fixture
def export(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    monkeypatch.setattr("edgekv.qnn.provider.compiler", lambda: COMPILER)
    folder = shutil.copytree(made, tmp_path / "made")
    options = ExportOptions(
        device=find("SM8650"),
        recipe=RECIPE,
        context=64,
        ar=(1, 16),
        calibration=folder / "text.txt",
        calibration_tokens=256,
        effort=Effort(3, descent_bits=4, weighs_attention=True, written_tokens=64),
        compile=True,
        lora=LoraOptions(4, calibrate=(AdapterChoice(folder / "adapter0"),)),
    )
    return Export(folder, options)


# Each field of a piece


def changed(value: Any) -> Iterator[Any]:
    """Values that differ from this one in one place, without checks: what cannot be must have another name too."""
    match value:
        case None:
            yield "something"
        case bool():
            yield not value
        case int() | float():
            yield value + 1
        case str():
            yield value + "x"
        case Path():
            yield value / "x"
        case range():
            yield range(value.start, value.stop + 1)
        case tuple() | list():
            yield [*value, "more"]
            for at, each in enumerate(value):
                yield [*value[:at], *value[at + 1 :]]
                yield from ([*value[:at], other, *value[at + 1 :]] for other in changed(each))
        case set() | frozenset():
            yield value | {"more"}
            yield from (value - {each} for each in value)
        case dict():
            for name, each in value.items():
                yield from (value | {name: other} for other in changed(each))
        case msgspec.Struct():
            for name in value.__struct_fields__:
                for other in changed(getattr(value, name)):
                    copied = copy.copy(value)
                    msgspec.structs.force_setattr(copied, name, other)
                    yield copied
        case _ if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                for other in changed(getattr(value, field.name)):
                    copied = copy.copy(value)
                    object.__setattr__(copied, field.name, other)
                    yield copied
        case _:
            raise AssertionError(f"{type(value).__name__}: nobody has said how it changes")


def test_each_field_of_each_piece_changes_its_name(export: Export):
    counted: dict[str, int] = {}
    for name, planned in export.plan.pieces.items():
        assert isinstance(planned.piece, Piece) and planned.piece.name == name
        names = [other.name for other in changed(planned.piece)]
        assert name not in names
        counted[planned.piece.kind] = max(counted.get(planned.piece.kind, 0), len(names))
    assert counted.keys() == {"survey", "text", "layer", "head", "ranges", "write", "quality", "check", "compile"} | {
        "encode",
        "reference",
        "evaluate",
    }
    assert counted["write"] > 200 > counted["layer"] > 40 and counted["check"] == 4 < counted["compile"]


@pytest.mark.parametrize(
    "piece",
    [
        CompileTflitePiece("bundle", "graphs.tflite", ("ar1_cl64",), "SM8650", COMPILER),
        PackPiece("bundle", "ar1_cl64"),
        SamplePiece("bundle", "ar1_cl64", "text"),
    ],
    ids=lambda piece: piece.kind,
)
def test_each_field_of_the_pieces_of_targets_changes_their_names(piece: Piece):
    names = [other.name for other in changed(piece)]
    assert len({piece.name, *names}) == len(names) + 1 > len(dataclasses.fields(piece))


def test_another_program_changes_every_name(export: Export, monkeypatch: pytest.MonkeyPatch):
    before = {*export.plan.pieces}
    monkeypatch.setattr(pieces, "program_sha256", lambda *_: "other")
    assert not before & {*export.plan.pieces}


# Each input of a user


def weights(export: Export) -> None:
    file = export.folder / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).flat[0] += np.float32(1)
    save_file(tensors, file)


def json_file(name: str, **changes: object) -> Callable[[Export], None]:
    def change(export: Export) -> None:
        file = export.folder / "checkpoint" / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | changes))

    return change


def tokenizer(export: Export) -> None:
    file = export.folder / "checkpoint" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")


def template(export: Export) -> None:
    (export.folder / "checkpoint" / "chat_template.jinja").write_text("{{ messages[0].content }}")


def calibration(export: Export) -> None:
    file = export.folder / "text.txt"
    file.write_text("x" + file.read_text())


def calibrated_adapter(export: Export) -> None:
    shutil.rmtree(export.folder / "adapter0")
    shutil.copytree(export.folder / "adapter1", export.folder / "adapter0")


def merged_adapter(export: Export) -> None:
    export.merged = (AdapterChoice(export.folder / "adapter1"),)


def compiler(export: Export) -> None:
    import edgekv.qnn.provider

    edgekv.qnn.provider.compiler = lambda: "another"  # type: ignore[assignment]  # undone with the fixture's patch


def options(**changes: Any) -> Callable[[Export], None]:
    def change(export: Export) -> None:
        export.options = replace(export.options, **changes)

    return change


def recipe(**changes: Any) -> Callable[[Export], None]:
    return options(recipe=msgspec.structs.replace(RECIPE, **changes))


def rule(tensors: str, dtype: Any, method: Any = "gptq") -> Callable[[Export], None]:
    return recipe(weights=(*RECIPE.weights, WeightRule(tensors=tensors, dtype=dtype, method=method)))


def slots(**changes: Any) -> Callable[[Export], None]:
    def change(export: Export) -> None:
        assert export.options.lora is not None
        export.options = replace(export.options, lora=replace(export.options.lora, **changes))

    return change


def text(**changes: Any) -> Callable[[Export], None]:
    def change(export: Export) -> None:
        export.text = replace(export.text, **changes)

    return change


INPUTS: dict[str, tuple[Callable[[Export], None], set[str]]] = {
    "weights": (weights, ALL),
    "configuration": (json_file("config.json", rope_theta=20000.0), ALL),
    "merged adapter": (merged_adapter, ALL),
    "calibration text": (calibration, ALL - ENCODED),
    "calibration tokens": (options(calibration_tokens=128), ALL - ENCODED),
    "attention window": (options(max_attention_window=(32,)), ALL),
    "tokenizer": (tokenizer, AFTER_SURVEY),
    "sampling defaults": (json_file("generation_config.json", do_sample=True, temperature=0.5), BUNDLE),
    "chat template": (template, {*BUNDLE, "encode chat", "reference prose"}),
    "sink": (options(sink=SinkRequest("tokens", (256,))), AFTER_SURVEY - ENCODED),
    "text to learn from": (
        options(effort=Effort(3, descent_bits=4, weighs_attention=True, written_tokens=128)),
        {"text", *QUANTIZED, *BUNDLE},
    ),
    "adapter to calibrate on": (calibrated_adapter, {"survey adapter", *QUANTIZED, *BUNDLE}),
    "cache": (options(kv_dtype="s16"), QUANTIZED | BUNDLE),
    "rotation": (recipe(rotation="none"), QUANTIZED | BUNDLE),
    "rule of the last layer": (rule("model.layers.2.*", "int8"), {"layer 2", "head"} | BUNDLE),
    "rule of the head": (rule("lm_head.weight", "int8", "nearest"), {"head"} | BUNDLE),
    "name of the recipe": (recipe(name="mine"), BUNDLE),
    "slots": (slots(rank=8), BUNDLE),
    "reach of slots": (slots(reach=2.0), BUNDLE),
    "key layout": (options(key_layout="rows"), BUNDLE),
    "AR": (options(ar=(1, 8)), BUNDLE),
    "parts": (options(splits=2), BUNDLE),
    "device": (options(device=find("SM8750")), {"check", "compile"}),
    "compiler": (compiler, {"check", "compile"}),
    "evaluated text": (text(content="other text " * 90), {"encode swept", "reference swept", "evaluate", "quality"}),
    "evaluated tokens": (text(tokens=40), {"reference swept", "evaluate", "quality"}),
    "title of the text": (text(title="other"), {"reference swept", "evaluate", "quality"}),
    "float allowed": (options(allow_float=True), set()),
}


@pytest.mark.parametrize("given", INPUTS)
def test_each_input_changes_the_pieces_that_read_it_and_no_others(export: Export, given: str):
    change, expected = INPUTS[given]
    before = export.names
    change(export)
    after = export.names
    assert {kind for kind in before.keys() | after.keys() if before.get(kind) != after.get(kind)} == expected
    for kind in expected & before.keys() & after.keys():
        assert not before[kind] & after[kind], kind


def test_pieces_are_shared_by_contexts_of_the_same_rotation(export: Export):
    options(calibration_tokens=64)(export)
    before = export.names
    options(context=128)(export)
    after = export.names
    shared = {kind for kind in before if before[kind] == after[kind]}
    assert shared == {*SURVEYS, "text", *ENCODED, *QUANTIZED}
