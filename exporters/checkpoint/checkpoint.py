"""A checkpoint on disk, a Hugging Face folder or a GGUF file. Weights are read on demand."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgekv.bundle import GenerationRecord
from edgekv.errors import CheckpointError
from edgekv.machine.json_file import readable_json
from edgekv.spec import (
    CONFIG,
    EMBEDDING,
    HEAD,
    HEAD_TURN,
    LAYER_INPUTS,
    LAYER_TABLE,
    LAYER_TABLE_NORM,
    LAYER_TABLE_PROJECTION,
    PICTURE_PLACES,
    Config,
    DecoderSpec,
    Task,
    View,
    by_inputs,
    decoder_tensor,
    describe,
    describe_drafter,
    read_json,
    text_tensor,
    views,
)
from edgekv.spec.chat import DEFAULT, ChatTemplates
from edgekv.spec.text import TOKENIZER, TOKENIZER_CONFIG, encode
from exporters.checkpoint.channels import SplitResidual
from exporters.checkpoint.check_tensors import check_tensors, renamed, without_zero_biases
from exporters.checkpoint.columns import TableColumns, outlier_columns
from exporters.checkpoint.drafter import drafter_tensors, head_tensors, is_of_head
from exporters.checkpoint.experts import with_rows_of_experts, with_stored_experts
from exporters.checkpoint.fold import EVERY, Factors, Floats, Rows, Transform, folded, folds
from exporters.checkpoint.generation import GENERATION_CONFIG, generation_record
from exporters.checkpoint.gguf import (
    GgufFile,
    chat_templates,
    check_metadata,
    gguf_tensors,
    hugging_face_config,
    is_gguf,
    rebuild_tokenizer,
    sampling_fields,
)
from exporters.checkpoint.locate import locate
from exporters.checkpoint.lora import Adapter, AdapterChoice, MergedTensor, merge
from exporters.checkpoint.quantized import (
    CarryCost,
    IntegerMatrix,
    Quantization,
    QuantizedMatrix,
    Storage,
    read_quantization,
)
from exporters.checkpoint.residual import stored_folds
from exporters.checkpoint.sentence import SentenceModel
from exporters.checkpoint.special import SpecialTokens, check_turn_end, check_vocabulary, special_tokens
from exporters.checkpoint.stored import CheckpointTensor, check_floats, same_numbers, stored_tensors
from exporters.checkpoint.tokenizer import CheckpointTokenizer, short_json
from exporters.checkpoint.vision import VisionEncoder
from quant import QuantizedWeight

_HASHED_BYTES = 1 << 22
SENTENCE = "sentence_transformers"
LARGEST_WEIGHT = 1e6
"""Above every published model's weights; a norm folded into a matrix stays far from infinity."""


@dataclass(frozen=True, slots=True)
class PicturedRows:
    """Rows of pictures for a text that has some.

    Attributes:
        rows: of the encoder, `[rows, hidden + ...]`: what is embedded, and what layers read or add behind them.
        places: of each; see `edgekv.pictures.row_places`.
    """

    rows: Floats
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint whose configuration, tokenizer and tensor shapes agree with each other.

    Attributes:
        predicts_further: whether it has layers that predict further tokens, which are left out.
        tokenizer_file: a `tokenizer.json` of this tokenizer; None if it was made from other files.
        task: what it gives if it writes no text; None for a model that does.
        ranks: whether it was opened as a reranker, though its files are those of a model of text.
    """

    name: str
    folder: Path
    spec: DecoderSpec
    special: SpecialTokens
    tokenizer: Tokenizer
    generation: GenerationRecord | None
    chat: ChatTemplates | None = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    _tensors: Mapping[str, CheckpointTensor] = field(repr=False)
    _views: dict[str, View] = field(repr=False)
    _files: tuple[Path, ...] = field(repr=False)
    quantization: Quantization | None = None
    adapters: tuple[Adapter, ...] = ()
    vision: VisionEncoder | None = field(default=None, repr=False)
    _pictured: PicturedRows | None = field(default=None, repr=False)
    predicts_further: bool = False
    tokenizer_file: Path | None = None
    task: Task | None = None
    ranks: bool = False
    _transforms: tuple[Transform, ...] = field(default=(), repr=False)

    @classmethod
    def open(cls, name: str, adapters: Sequence[AdapterChoice] = (), *, ranks: bool = False) -> Checkpoint:
        """Open a folder or a GGUF file, or download a hub id such as `org/model` through huggingface_hub.

        Args:
            name: of the folder, file or id.
            adapters: merged into the weights, in order.
            ranks: whether a model of text is a reranker; see `SentenceModel.of_text_model`.

        Raises:
            CheckpointError: naming the file or field that is missing, broken, contradictory or unsupported.
        """
        if is_gguf(path := Path(name)):
            if ranks:
                fix = "Export the folder that transformers reads."
                raise CheckpointError("--task rerank", got="a GGUF file", expected="a folder", fix=fix)
            return cls._open_gguf(path, adapters)
        folder = locate(name)
        config, tokenizer_files = read_json(folder / CONFIG), CheckpointTokenizer.open(folder)
        tokenizer = tokenizer_files.tokenizer
        sentence = SentenceModel.of_text_model(folder, tokenizer) if ranks else SentenceModel.open(folder, config)
        if sentence is not None:
            config = {**config, "tie_word_embeddings": False, SENTENCE: sentence.settings}
        spec = describe(Config({name: value for name, value in config.items() if name != SENTENCE}))
        quantization = read_quantization(config)
        generation = read_json(folder / GENERATION_CONFIG, optional=True)
        check_vocabulary(tokenizer, spec.vocab, str(folder / TOKENIZER))
        special = special_tokens(config, generation, tokenizer, spec.vocab, tokenizer_files.named)
        parts = stored_tensors(folder)
        tensors: Mapping[str, CheckpointTensor] = quantization.matrices(parts) if quantization else parts
        check_floats(tensors)
        vision = None
        ahead = [key for key in tensors if is_of_head(key)]
        tensors = {key: stored for key, stored in tensors.items() if key not in ahead}
        if spec.multimodal:
            vision = None if quantization else VisionEncoder.open(config, folder, parts)
            if vision is not None and vision.decoder is not None:
                spec = vision.decoder(spec)
            tensors = renamed(tensors, text_tensor)
            if HEAD in tensors and EMBEDDING in tensors and not same_numbers(tensors[HEAD], tensors[EMBEDDING]):
                # The field is often absent and its default differs between releases; transformers does the same.
                spec = msgspec.structs.replace(spec, tied_head=False)
        else:
            tensors = renamed(tensors, decoder_tensor)
        spec = with_stored_experts(spec, tensors)
        if sentence is not None:
            tensors, spec = sentence.fitted(tensors, spec)
        elif spec.bidirectional:
            raise CheckpointError(
                f"{folder / CONFIG}: use_bidirectional_attention",
                got=True,
                expected="a folder of sentence-transformers, with modules.json: it cannot write text",
                fix="Fetch all files of the checkpoint.",
            )
        decoder_views = {view.name: view for view in views(spec)}
        tensors = without_zero_biases(tensors, decoder_views)
        check_tensors(tensors, decoder_views.values(), spec)
        read = {tensor.file for tensor in (parts if quantization else tensors).values()}
        read |= {*(() if sentence is None else sentence.files), *(() if vision is None else vision.files)}
        files = tuple(sorted(read))
        tensors = with_rows_of_experts(tensors, decoder_views.values())
        tensors, spec, merged = merge(tensors, spec, adapters)
        decoder_views = {view.name: view for view in views(spec)}
        defaults, chat = generation_record(generation), tokenizer_files.templates(reads_pictures=vision is not None)
        check_turn_end(chat, tokenizer, special.eos)
        opened = cls(name, folder, spec, special, tokenizer, defaults, chat, config, tensors, decoder_views, files)
        return replace(
            opened,
            quantization=quantization,
            adapters=merged,
            vision=vision,
            predicts_further=bool(ahead),
            tokenizer_file=tokenizer_files.file,
            task=None if sentence is None else sentence.task_with(chat, folder),
            ranks=ranks,
        )

    @classmethod
    def open_drafter(cls, name: str, target: Checkpoint, frame: Floats | None = None) -> Checkpoint:
        """Open the folder or hub id of a drafter that reads the state of another model.

        If it reads the target's cache, its embeddings are those of the target, projected: the first half of the columns
        of `TARGET_IN` is multiplied with the target's table, the others stay. What drafter and target exchange is what
        the target's head reads. A model's own head for further tokens has the model's embeddings and head.

        Args:
            name: of the folder or id.
            target: as its bundle has it: with its vocabulary, channels and attention windows.
            frame: see `head_tensors`; None if graphs give the hidden states of the checkpoint.

        Raises:
            CheckpointError: naming the file or field that is missing, broken, unsupported, or of another target.
        """
        folder = locate(name)
        spec = describe_drafter(Config(config := read_json(folder / CONFIG)), target.spec)
        generation = read_json(folder / GENERATION_CONFIG, optional=True)
        tokenizer_files = CheckpointTokenizer.open(folder)
        tokenizer = tokenizer_files.tokenizer
        check_vocabulary(tokenizer, spec.vocab, str(folder / TOKENIZER))
        if tokenizer.get_vocab(with_added_tokens=True) != target.tokenizer.get_vocab(with_added_tokens=True):
            fix = "Give the target that the drafter was trained for."
            raise CheckpointError(
                f"{folder / TOKENIZER}", got="another vocabulary", expected=f"that of {target.name}", fix=fix
            )
        stored = stored_tensors(folder)
        if spec.target is not None and spec.target.is_cached_apart:
            frame = np.eye(spec.hidden, dtype=np.float32) if frame is None else frame
            tensors = head_tensors(stored, spec, target, frame)
            stored = {key: tensor for key, tensor in stored.items() if is_of_head(key)}
        else:
            tensors = drafter_tensors(stored, spec, target)
        check_floats(stored)
        check_tensors(tensors, views(spec), spec)
        special = special_tokens(config, generation, tokenizer, spec.vocab, tokenizer_files.named)
        files = tuple(sorted({tensor.file for tensor in stored.values()}))
        decoder_views = {view.name: view for view in views(spec)}
        opened = cls(name, folder, spec, special, tokenizer, None, None, config, tensors, decoder_views, files)
        return replace(opened, tokenizer_file=tokenizer_files.file)

    @classmethod
    def _open_gguf(cls, path: Path, adapters: Sequence[AdapterChoice]) -> Checkpoint:
        file = GgufFile(path)
        config = hugging_face_config(file)
        spec = describe(Config(config, path.name))
        # GGUF stores norms with the offset added, and the rows of all queries first; names are the decoder's own.
        fused = frozenset("attention" if part == "heads" else part for part in spec.fused - {"experts"})
        fused -= {"mlp"} if "blk.0.ffn_gate.weight" in file.blocks else frozenset()
        spec = msgspec.structs.replace(spec, norm_offset=0.0, stored_names=(), fused=fused)
        tokenizer = rebuild_tokenizer(file)
        check_vocabulary(tokenizer, spec.vocab, str(path))
        tensors: Mapping[str, CheckpointTensor] = gguf_tensors(file)
        check_tensors(tensors, views(spec), spec)
        tensors, spec, merged = merge(tensors, spec, adapters)
        decoder_views = {view.name: view for view in views(spec)}
        defaults, chat = generation_record(sampling_fields(file), path.name), chat_templates(file)
        special = special_tokens(config, {}, tokenizer, spec.vocab, {} if chat is None else chat.tokens)
        check_metadata(file)
        check_turn_end(chat, tokenizer, special.eos)
        return cls(
            str(path),
            path,
            spec,
            special,
            tokenizer,
            defaults,
            chat,
            config,
            tensors,
            decoder_views,
            file.parts,
            adapters=merged,
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the weights."""
        return self._files

    @property
    def config_sha256(self) -> str:
        """A hash of the configuration."""
        return hashlib.sha256(msgspec.json.encode(self.config, order="sorted")).hexdigest()

    def tokenizer_json(self) -> bytes:
        """The `tokenizer.json` of a bundle."""
        file = self.tokenizer_file
        return short_json(self.tokenizer.to_str() if file is None else file.read_text("utf-8"))

    def write_tokenizer(self, folder: Path) -> None:
        """Write `tokenizer.json`, and `tokenizer_config.json` with what else transformers' `AutoTokenizer` reads.

        That is the class, special tokens by name, and the chat templates.
        """
        (folder / TOKENIZER).write_bytes(self.tokenizer_json())
        config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {"clean_up_tokenization_spaces": False, **self.special.named}
        if self.chat is None:  # a template reads only names that the tokenizer has
            config = self._names_of_ids() | config
        if self.chat is not None:
            named = [{"name": name, "template": template} for name, template in self.chat.templates.items()]
            config["chat_template"] = self.chat.templates[DEFAULT] if [*self.chat.templates] == [DEFAULT] else named
        (folder / TOKENIZER_CONFIG).write_bytes(readable_json(config))

    def _names_of_ids(self) -> dict[str, object]:
        """The configuration's special tokens by their names, but for those that the tokenizer takes for text."""
        special, tokens = self.special, self.tokenizer.get_added_tokens_decoder()
        ids = {"bos_token": special.bos, "eos_token": next(iter(special.eos), None), "pad_token": special.pad}
        return {name: tokens[i].content for name, i in ids.items() if i in tokens and tokens[i].special}

    def as_spec(self, spec: DecoderSpec) -> Checkpoint:
        """The same model as options of an export change it.

        They are its attention windows, the types of its states, whether its graphs give the last hidden state, channels
        of the residual that are split, and where its vocabulary is.

        Raises:
            CheckpointError: the decoder differs in another field, or was split already.
        """
        states, channels, vocabulary = spec.convolution_states, spec.split, spec.vocabulary
        changed = self.spec if states is None else self.spec.with_states(states.dtype)
        changed = msgspec.structs.replace(changed, limits=spec.limits, gives_hidden=spec.gives_hidden)
        transforms = self._transforms
        if channels and channels != changed.split:
            split = SplitResidual(changed, channels)
            changed, transforms = split.spec, (*transforms, split)
        checkpoint = replace(self, spec=changed, _transforms=transforms)
        if vocabulary != changed.vocabulary:
            columns = outlier_columns(spec.vocab, checkpoint.tensor) if vocabulary == "shared" else None
            changed = msgspec.structs.replace(changed, vocabulary=vocabulary)
            transforms = transforms if columns is None else (*transforms, TableColumns(columns))
        stored = {view.name: view for view in views(changed) if view.role != "turn"}
        checkpoint = replace(checkpoint, spec=changed, _views=stored, _transforms=transforms)
        if checkpoint.spec != spec or (self.spec.split and channels != self.spec.split):
            names = (name for name in spec.__struct_fields__ if getattr(checkpoint.spec, name) != getattr(spec, name))
            raise CheckpointError(
                f"checkpoint {self.name}",
                got=f"a decoder with another {next(names, 'split')}",
                expected="the decoder of its export",
                fix="Give the checkpoint of the export, and export bundles of other versions again.",
            )
        return checkpoint

    def with_pictures(self, rows: PicturedRows) -> Checkpoint:
        """The same model whose table of embeddings goes on with rows of pictures, for calibration."""
        return replace(self, _pictured=rows)

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        """A tensor of the decoder as float32, read now, under the name that it has in Llama's checkpoints.

        The matrix that turns the input of the head is 0: nothing is folded into the head yet. Matrices are `[out, in]`,
        as stored; see `View` for offsets and gains.

        Args:
            key: its name.
            rows: the rows to read; None for all.
        """
        if key == HEAD_TURN:
            return np.zeros((self.spec.hidden, self.spec.hidden), np.float32)[rows]
        if key in (LAYER_INPUTS, PICTURE_PLACES) and not self.spec.layer_inputs:
            return self._of_pictures(key, rows)
        if key == LAYER_INPUTS:
            return self._layer_inputs(rows)
        return folded(self._stored, self._views, self._folds)(key, rows)

    @property
    def _folds(self) -> tuple[Transform, ...]:
        """What is folded into the tensors, the first one first."""
        return (*stored_folds(self.spec), *self._transforms)

    def as_head(self, rows: Floats) -> Floats:
        """Rows `[n, hidden]` that multiply the last hidden state, with all that the head's rows are changed by."""
        for fold in folds(self._views[HEAD], self._folds):
            if fold.in_map is not None:
                rows = fold.in_map(rows.copy())
        return rows / np.float32(self.spec.head_gain)

    def change(self, key: str, change: Factors) -> Factors:
        """A change of a stored matrix, such as an adapter's, as `tensor` reads the matrix."""
        for fold in folds(self._views[key], self._folds):
            change = fold.change(change)
        return change

    def _stored(self, key: str, rows: Rows) -> Floats:
        """A tensor before the transforms."""
        view = self._views[key]
        if key == EMBEDDING and self._pictured is not None and not isinstance(rows, slice):
            beyond = rows >= view.shape[0]
            values = replace(self, _pictured=None)._stored(key, np.where(beyond, 0, rows))
            values[beyond] = self._pictured.rows[rows[beyond] - view.shape[0], : view.shape[1]]
            return values
        if not view.is_stored:
            return np.full(view.shape, view.gain, np.float32)[rows]
        if view.norm_bias is not None:
            weight = self._stored(key.removesuffix("bias") + "weight", rows)
            shift: Floats = weight @ self._stored(view.norm_bias, EVERY)
            if view.key == self._views[view.norm_bias].key:
                return shift
            return shift + self._stored_values(view, rows)
        return self._stored_values(view, rows)

    def _stored_values(self, view: View, rows: Rows) -> Floats:
        """Some rows of a part of one stored tensor."""
        values = self._tensors[view.key].read(view.stored_rows(rows))
        if view.stored_as == "log":
            values = -np.exp(values)
        elif view.stored_as == "inverse-log":
            values = -np.exp(-values)
        elif view.stored_as == "softplus":
            values = np.logaddexp(values, np.float32(0))
        if view.offset:
            values += np.float32(view.offset)
        if view.gain != 1.0:
            values *= np.float32(view.gain)
        if view.row_gains:
            gains = np.concatenate([np.full(count, gain, np.float32) for count, gain in view.row_gains])[rows]
            values *= gains.reshape(-1, *[1] * (values.ndim - 1))
        return values

    def _of_pictures(self, key: str, rows: Rows) -> Floats:
        """What is added behind layers of tokens `[T, layers * hidden]`, or where they stand in pictures, `[T, 3]`."""
        assert not isinstance(rows, slice), "of the tokens of a text"
        values = np.zeros((len(rows), 3 if key == PICTURE_PLACES else self.spec.gathered_width), np.float32)
        if key == PICTURE_PLACES:
            values[:, 2] = 1
        if (pictured := self._pictured) is not None:
            beyond = rows >= self.spec.vocab
            source = pictured.places if key == PICTURE_PLACES else pictured.rows[:, self.spec.hidden :]
            values[beyond] = source[rows[beyond] - self.spec.vocab]
        return values

    def _layer_inputs(self, rows: Rows) -> Floats:
        """What layers read of tokens, `[T, layers * P]`; see `LAYER_INPUTS`."""
        spec, eps = self.spec, np.float32(self.spec.eps)
        if self._pictured is not None and not isinstance(rows, slice):
            beyond = rows >= spec.vocab
            values = replace(self, _pictured=None)._layer_inputs(np.where(beyond, 0, rows))
            values[beyond] = self._pictured.rows[rows[beyond] - spec.vocab, -values.shape[1] :]
            return values
        projection = self._stored(LAYER_TABLE_PROJECTION, EVERY) * np.float32(spec.hidden**-0.5)
        layer_inputs: Floats = self._stored(EMBEDDING, rows) @ by_inputs(projection)
        by_layer = layer_inputs.reshape(len(layer_inputs), spec.layers, spec.layer_inputs)
        by_layer /= np.sqrt(np.square(by_layer).mean(-1, keepdims=True) + eps)
        by_layer *= self._stored(LAYER_TABLE_NORM, EVERY)
        if spec.layer_table:
            layer_inputs += self._stored(LAYER_TABLE, rows) * np.float32(spec.layer_inputs**0.5)
            layer_inputs *= np.float32(0.5**0.5)
        return layer_inputs

    def storage(self, key: str) -> Storage | None:
        """What a bundle can make of the stored form of a matrix; None if it is stored as floats."""
        if key == HEAD_TURN:
            return None
        view = self._views[key]
        stored = self._tensors[view.key]
        if view.is_reordered and isinstance(stored, QuantizedMatrix):
            return replace(stored.storage(), obstacle="output channels in another order")
        if self.spec.layer_norms and view.writes_residual and isinstance(stored, QuantizedMatrix):
            return replace(stored.storage(), obstacle="read without the mean of its outputs")
        if isinstance(stored, MergedTensor) and isinstance(stored.base, QuantizedMatrix):
            return replace(stored.base.storage(), obstacle="merged with an adapter")
        return stored.storage() if isinstance(stored, QuantizedMatrix) else None

    def integers(self, key: str, rows: slice = EVERY) -> QuantizedWeight:
        """The stored integers of a matrix whose `storage` has no obstacle, or of some of its output channels."""
        view = self._views[key]
        places = view.stored_rows(rows)
        assert isinstance(places, slice), "a matrix in another order has an obstacle"
        return self._integer_matrix(key).carried(places, view.gain)

    def carry_cost(self, key: str) -> CarryCost:
        """What `integers` changes in the stored matrix."""
        view = self._views[key]
        return self._integer_matrix(key).cost(view.first, view.first + view.shape[0])

    def _integer_matrix(self, key: str) -> IntegerMatrix:
        stored = self._tensors[self._views[key].key]
        if not isinstance(stored, IntegerMatrix):
            raise ValueError(f"{key}: got floats; expected stored integers")
        return stored

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(
            int(np.prod(self._tensors[key].shape))
            for key in {view.key for view in self._views.values() if view.is_stored}
        )

    def check_values(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Read every tensor of the decoder once and reject values that no graph can represent.

        Args:
            progress: called with the number of finished tensors and the total.

        Raises:
            CheckpointError: naming a tensor with NaN or infinite elements, or with elements above `LARGEST_WEIGHT`, as
                stored or as the decoder reads them.
        """
        keys: dict[str, list[View]] = {}
        for view in (view for view in self._views.values() if view.is_stored):
            keys.setdefault(view.key, []).append(view)
        for done, (key, read_as) in enumerate(keys.items()):
            progress(done, len(keys))
            largest = self._tensors[key].largest()
            if not math.isfinite(largest):
                broken = self._tensors[key].count_not_finite()
                raise _broken(key, f"{broken} elements that are NaN or infinite", "finite numbers")
            read = max((largest + abs(view.offset)) * abs(view.gain) for view in read_as)
            if max(largest, read) > LARGEST_WEIGHT:
                got = f"elements of up to {max(largest, read):.3g}"
                raise _broken(key, got, f"at most {LARGEST_WEIGHT:.0e} in magnitude")
        if self.vision is not None:
            self.vision.check_values()
        progress(len(keys), len(keys))

    def weights_sha256(self, progress: Callable[[int, int], None] = lambda done, of: None) -> str:
        """One hash over all weight files, in name order, and over the adapters and their scales.

        Args:
            progress: called with the number of hashed blocks and the total.
        """
        digest, done = hashlib.sha256(), 0
        blocks = sum(-(-path.stat().st_size // _HASHED_BYTES) for path in self._files)
        progress(done, blocks)
        for path in self._files:
            with path.open("rb") as file:
                while block := file.read(_HASHED_BYTES):
                    digest.update(block)
                    done += 1
                    progress(done, blocks)
        for adapter in self.adapters:
            digest.update(f"{adapter.sha256}={adapter.scale!r}".encode())
        return digest.hexdigest()

    def encode(self, text: str, *, around: bool = False) -> list[int]:
        """Token ids of a text; with `around`, those that the tokenizer's template adds too."""
        return encode(self.tokenizer, text, vocab=self.spec.vocab, field="text", add_special_tokens=around)


def _broken(key: str, got: str, expected: str) -> CheckpointError:
    fix = "The training or a conversion diverged, or the file is damaged: use another checkpoint."
    return CheckpointError(f"weights: {key}", got=got, expected=expected, fix=fix)
