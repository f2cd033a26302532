"""Folders of sentence-transformers: how the hidden states of a decoder become embeddings or scores of texts.

`modules.json` lists modules in the order in which they run. Of embedders these are a transformer, pooling, dense layers
and a normalization: dense layers without an activation function are one matrix, which commutes with a mean. Rerankers
have a head of one label, or score by the logits of two tokens: the difference of two rows. Each is the decoder's head.
A reranker without `modules.json`, such as Qwen3-Reranker as it was published, is a model of text until it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from tokenizers import Tokenizer

from edgekv.bundle import is_plain_path
from edgekv.errors import CheckpointError
from edgekv.spec import EMBEDDING, HEAD, DecoderSpec, EmbeddingTask, RankingTask, Task, read_json
from edgekv.spec.chat import DEFAULT, ChatTemplates
from edgekv.spec.task import Pooling
from edgekv.spec.template_sandbox import TemplateFailedError, TemplateLimitError, render_sandboxed
from exporters.checkpoint.fold import Floats, Rows
from exporters.checkpoint.stored import CheckpointTensor, ComputedTensor, tensors_of

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
FILES = (MODULES, PROMPTS, "sentence_bert_config.json", "*/config.json", "*/model.safetensors")
"""Files that are read, as patterns."""

_LENGTHS = "sentence_bert_config.json"
_LARGEST_BYTES = 1 << 20
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of releases before `pooling_mode`."""
_SENTENCE = "sentence_embedding"
_SCORES = "score.weight"
_PROJECTION = "model.embedding_projection.weight"
_HEADS = ("lm_head.", "score.")
_CLASSIFIER = "ForSequenceClassification"
_YES, _NO = "yes", "no"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
)
_QUERY, _DOCUMENT = "\n<Query>: ", "\n<Document>: "
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""What Qwen3-Reranker was trained with, as its model card says."""
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_MARKS = ("mark", "other words")
"""Two contents: what is the same around both does not depend on them."""
_FIX = "Export a checkpoint without it, or compute its embeddings with sentence-transformers."


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense layer without an activation function and without a bias.

    Attributes:
        weight: `[out, in]`.
    """

    weight: CheckpointTensor

    @classmethod
    def open(cls, folder: Path) -> Dense:
        """Read a layer's folder.

        Raises:
            CheckpointError: naming the field or tensor that is missing, contradictory or not supported.
        """
        config = _read(folder / "config.json")
        activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        if activation.rpartition(".")[2] != "Identity":
            _refuse(folder / "config.json", "activation_function", activation, "Identity: the layer is a matrix alone")
        for name, plain in (("bias", False), ("use_residual", False)):
            if (value := config.get(name, name == "bias")) is not plain:
                _refuse(folder / "config.json", name, value, "false")
        _check_names(config, folder / "config.json")
        sizes = config.get("out_features"), config.get("in_features")
        file = folder / "model.safetensors"
        if not file.is_file():
            _refuse(file, "", "no such file", "the weights of the dense layer", "Fetch all files of the checkpoint.")
        weight = dict(tensors_of(file)).get("linear.weight")
        if weight is None or weight.shape != sizes:
            value = "none" if weight is None else f"shape {list(weight.shape)}"
            _refuse(file, "linear.weight", value, f"shape {list(sizes)}, as its config.json says", "Fetch both again.")
        return cls(weight)


@dataclass(frozen=True, slots=True)
class _Product(ComputedTensor):
    """The dense layers as one matrix `[out, hidden]`; the identity without any.

    Attributes:
        hidden: width of the residual.
        layers: those that run first, first.
        file: of the weights.
    """

    hidden: int
    layers: tuple[Dense, ...]
    file: Path
    _kept: list[Floats] = field(default_factory=list, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.layers[-1].weight.shape[0] if self.layers else self.hidden), self.hidden

    def read(self, rows: Rows) -> Floats:
        if not self._kept:
            product = np.eye(self.hidden, dtype=np.float32)
            for layer in self.layers:
                product = layer.weight.read(slice(None)) @ product
            self._kept.append(product)
        return self._kept[0][rows].copy()


@dataclass(frozen=True, slots=True)
class _Difference(ComputedTensor):
    """The row of one token in a head for text, without that of another one, `[1, hidden]`."""

    head: CheckpointTensor
    yes: int
    no: int | None

    @property
    def file(self) -> Path:  # type: ignore[override]
        return self.head.file

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return 1, self.head.shape[1]

    def read(self, rows: Rows) -> Floats:
        direction = self.head.read(slice(self.yes, self.yes + 1))
        if self.no is not None:
            direction = direction - self.head.read(slice(self.no, self.no + 1))
        return direction[rows]


@dataclass(frozen=True, slots=True)
class LogitScore:
    """Scores by the logits of one or two tokens.

    Attributes:
        yes: id of the token that says that a document fits.
        no: id of the one that says the opposite; None for the first logit alone.
    """

    yes: int
    no: int | None

    @classmethod
    def open(cls, file: Path) -> LogitScore:
        """Read its configuration.

        Raises:
            CheckpointError: naming the field that is missing or not supported.
        """
        config = _read(file)
        yes, no = config.get("true_token_id"), config.get("false_token_id")
        for name, token_id in (("true_token_id", yes), ("false_token_id", no)):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                if name == "false_token_id" and token_id is None:
                    continue
                _refuse(file, name, token_id, "a token id")
        return cls(int(config["true_token_id"]), no)


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """What runs behind the transformer.

    Attributes:
        task: what the model gives; None for a reranker whose template is the checkpoint's.
        dense: the layers behind the pooling.
        score: how a head for text gives scores; None if there is a head of its own.
        settings: all that was read of JSON files, by file.
    """

    task: Task | None
    dense: tuple[Dense, ...]
    score: LogitScore | None
    settings: Mapping[str, Any]

    @classmethod
    def of_text_model(cls, folder: Path, tokenizer: Tokenizer) -> SentenceModel:
        """A model of text whose answer to Qwen3-Reranker's prompt says whether a document fits: yes or no.

        Raises:
            CheckpointError: the folder is that of another kind of model, or its tokenizer lacks a token.
        """
        if (folder / MODULES).is_file():
            got, expected = f"{MODULES}, which says what it is", "a model of text, as transformers writes it"
            _refuse("--task rerank", "", got, expected, "Leave --task out.")
        wanted_tokens = (_YES, _NO, *_SPECIAL)
        ids = {token: number for token in wanted_tokens if (number := tokenizer.token_to_id(token)) is not None}
        if missing := [token for token in wanted_tokens if token not in ids]:
            expected = f"the tokens {', '.join(wanted_tokens)} of Qwen3-Reranker's prompt and answer"
            fix = "Export a checkpoint with modules.json, as sentence-transformers 5.4 writes it."
            _refuse("--task rerank", "", f"a tokenizer without {', '.join(missing)}", expected, fix)
        score = LogitScore(ids[_YES], ids[_NO])
        task = RankingTask(
            pieces=(_BEFORE + _INSTRUCTION + _QUERY, _DOCUMENT, _BEHIND),
            instructed=(_BEFORE, _QUERY, _DOCUMENT, _BEHIND),
        )
        return cls(task, (), score, {"task": "rerank", "score": [score.yes, score.no]})

    @classmethod
    def open(cls, folder: Path, config: Mapping[str, Any]) -> SentenceModel | None:
        """Read a folder; None if it writes text: it has no `modules.json`, and no head of a classifier.

        Args:
            folder: of the checkpoint.
            config: its `config.json`.

        Raises:
            CheckpointError: naming the file and field that is missing, contradictory or not supported.
        """
        path, classifies = folder / MODULES, _classifies(config)
        if not path.is_file() and not classifies:
            return None
        modules = _read_list(path) if path.is_file() else [{"type": "Transformer", "path": ""}]
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        named = [str(module.get("path", "")) for module in modules]
        if outside := [name for name in named[1:] if not is_plain_path(name)]:
            _refuse(path, "path", outside[0][:80], "folders within the checkpoint")
        if named[0] not in ("", "."):
            _refuse(path, "path", f"{named[0][:80]} of the Transformer", "the folder of the checkpoint itself")
        told, lengths = _read(folder / PROMPTS, optional=True), _read(folder / _LENGTHS, optional=True)
        settings: dict[str, Any] = {MODULES: [*modules], PROMPTS: told, _LENGTHS: lengths}
        if kinds == ["Transformer"] and classifies:
            if (labels := len(config.get("id2label") or "ab")) != 1:
                _refuse(folder / "config.json", "id2label", f"{labels} labels", "one, whose logit is the score")
            return cls(None, (), None, settings)
        if kinds == ["Transformer", "LogitScore"]:
            score = LogitScore.open(folder / named[1] / "config.json")
            return cls(None, (), score, settings | {"score": [score.yes, score.no]})
        behind = [kind for kind in kinds[1:] if kind not in ("Pooling", "Dense", "Normalize")]
        in_order = kinds[:2] == ["Transformer", "Pooling"] and kinds.count("Pooling") == 1
        if behind or not in_order or "Normalize" in kinds[:-1]:
            expected = "Transformer, Pooling, and perhaps Dense layers and Normalize; or Transformer and LogitScore"
            _refuse(path, "type", ", ".join(kinds)[:200], expected)
        pooling_file = folder / named[1] / "config.json"
        pooling, includes_prompt = _read_pooling(pooling_file)
        dense = [Dense.open(folder / name) for kind, name in zip(kinds, named, strict=True) if kind == "Dense"]
        prompts, default = _read_prompts(told, folder / PROMPTS)
        task = EmbeddingTask(
            pooling=pooling,
            normalizes="Normalize" in kinds,
            prompts=prompts,
            default_prompt=default,
            pools_prompt=includes_prompt,
            max_tokens=_longest(lengths, folder),
        )
        return cls(task, tuple(dense), None, settings | {"pooling": _read(pooling_file)})

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the dense layers' weights."""
        return tuple(layer.weight.file for layer in self.dense)

    def fitted(
        self, tensors: Mapping[str, CheckpointTensor], spec: DecoderSpec
    ) -> tuple[dict[str, CheckpointTensor], DecoderSpec]:
        """The tensors of a checkpoint with the head that this one needs, and the decoder with it.

        Args:
            tensors: by the names of models of text; a base model's have no `model.` in front.
            spec: the decoder of a model of text, with a head of its own.

        Raises:
            CheckpointError: a dense layer does not fit the one before, or there is no head of scores.
        """
        renamed = {
            key if key.startswith(("model.", *_HEADS)) else f"model.{key}": tensor for key, tensor in tensors.items()
        }
        text_head, scores = renamed.pop(HEAD, None), renamed.pop(_SCORES, None)
        if (table := renamed.get(EMBEDDING)) is None:
            return renamed, spec  # what is missing is named later
        gain, head, own = 1.0, scores, renamed.pop(_PROJECTION, None) if spec.outputs else None
        if spec.outputs and (own is None or own.shape != (spec.outputs, spec.hidden)):
            got, expected = "none" if own is None else f"shape {list(own.shape)}", [spec.outputs, spec.hidden]
            _refuse("weights", _PROJECTION, got, f"shape {expected}", "Fetch all files of the checkpoint.")
        if isinstance(self.task, EmbeddingTask):
            head = self._product(spec, table.file, own)
        elif self.score is not None:
            gain, head = spec.logits_gain, self._difference(spec, text_head or table)
        elif head is None or head.shape != (1, spec.hidden):
            got = "none" if head is None else f"shape {list(head.shape)}"
            _refuse("weights", _SCORES, got, f"shape {[1, spec.hidden]}", "Fetch all files of the checkpoint.")
        plain = msgspec.structs.replace(
            spec,
            tied_head=False,
            outputs=head.shape[0],
            logits_gain=gain,
            logits_cap=None,
            biased=spec.biased - {"lm_head"},
            made_biases=spec.made_biases - {"lm_head"},
        )
        return {**renamed, HEAD: head}, plain

    def _difference(self, spec: DecoderSpec, head: CheckpointTensor) -> ComputedTensor:
        assert self.score is not None, "it scores by tokens"
        if spec.logits_cap is not None or "lm_head" in spec.biased:
            got = "a cap of logits" if spec.logits_cap is not None else "a bias of the head"
            _refuse("LogitScore", "", got, "logits that are a product alone")
        for token in (self.score.yes, self.score.no):
            if token is not None and token >= head.shape[0]:
                _refuse("LogitScore", "", f"the token {token}", f"ids below {head.shape[0]}, the vocabulary")
        return _Difference(head, self.score.yes, self.score.no)

    def _product(self, spec: DecoderSpec, file: Path, own: CheckpointTensor | None) -> ComputedTensor:
        """The matrix that makes embeddings of the last norm's results, `[out, hidden]`; `own`: of the model itself."""
        width, layers = spec.hidden, (*(() if own is None else (Dense(own),)), *self.dense)
        for layer in layers:
            if layer.weight.shape[1] != width:
                field = f"{layer.weight.file}: linear.weight"
                _refuse(field, "", f"shape {list(layer.weight.shape)}", f"[out, {width}], the width of what it reads")
            width = layer.weight.shape[0]
        return _Product(spec.hidden, layers, file)

    def task_with(self, templates: ChatTemplates | None, folder: Path) -> Task:
        """The task; of a reranker with its template.

        Args:
            templates: of the checkpoint.
            folder: of the checkpoint.

        Raises:
            CheckpointError: a template that does not put the query in front of the document, or changes them.
        """
        if self.task is not None:
            return self.task
        told = self.settings[PROMPTS]
        prompts, default = _read_prompts(told, folder / PROMPTS)
        name = str(told.get("activation_fn") or "Sigmoid").rpartition(".")[2]
        if name not in ("Sigmoid", "Identity"):
            _refuse(folder / PROMPTS, "activation_fn", name, "Sigmoid or Identity")
        pieces = None if templates is None else _pieces(templates, ("query", "document"))
        instructed = None if templates is None else _pieces(templates, ("system", "query", "document"))
        if pieces is None and self.score is not None:
            fix = "Take a revision of the checkpoint whose chat_template.jinja has these roles."
            got = "no template" if templates is None else "one that leaves them out, changes them or swaps them"
            _refuse(str(folder), "chat template", got, "one with a query and a document in it", fix)
        if default is not None and not (pieces and instructed):
            _refuse(folder / PROMPTS, "default_prompt_name", default, "none: the template has no place for it")
        return RankingTask(
            pieces=pieces or (),
            instructed=(instructed if pieces else None) or (),
            instruction=None if default is None else prompts[default],
            activation="sigmoid" if name == "Sigmoid" else "none",
            max_tokens=_longest(self.settings[_LENGTHS], folder),
        )


def _classifies(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and bool(named) and str(named[0]).endswith(_CLASSIFIER)


def _longest(lengths: Mapping[str, Any], folder: Path) -> int | None:
    longest = lengths.get("max_seq_length")
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        _refuse(folder / _LENGTHS, "max_seq_length", longest, "a whole number above 0")
    return longest


def _pieces(templates: ChatTemplates, roles: Sequence[str]) -> tuple[str, ...] | None:
    """The text around the contents of messages with these roles; None if a template does more with them."""
    around = {_around(templates, roles, mark) for mark in _MARKS}
    return around.pop() if len(around) == 1 else None


def _around(templates: ChatTemplates, roles: Sequence[str], mark: str) -> tuple[str, ...] | None:
    contents = [f"{mark}{number}{mark}" for number in range(len(roles))]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    if (source := templates.templates.get(DEFAULT)) is None:
        return None
    variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
    try:
        rest = render_sandboxed(source, {**templates.tokens, **variables})
    except (TemplateFailedError, TemplateLimitError):
        return None
    pieces = list[str]()
    for content in contents:
        before, separator, rest = rest.partition(content)
        if not separator:
            return None
        pieces.append(before)
    return None if mark in rest or any(mark in piece for piece in pieces) else (*pieces, rest)


def _read_pooling(path: Path) -> tuple[Pooling, bool]:
    """The pooling, and whether it includes the prompt."""
    config = _read(path)
    named = [mode for flag, mode in _OLDER.items() if config.get(flag)]
    pooling = config.get("pooling_mode", named or ["mean"])
    modes = pooling if isinstance(pooling, list) else [pooling]
    if len(modes) != 1 or str(modes[0]) not in _POOLINGS:
        expected = f"one of {', '.join(sorted(_POOLINGS))}"
        _refuse(path, "pooling_mode", ", ".join(map(str, modes))[:200], expected)
    return _POOLINGS[str(modes[0])], config.get("include_prompt", True) is not False


def _read_prompts(told: Mapping[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    prompts, default = told.get("prompts") or {}, told.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        _refuse(path, "prompts", "something else", "a text by name of each task")
    if default is not None and default not in prompts:
        _refuse(path, "default_prompt_name", default, "a name in prompts")
    return prompts, default


def _check_names(config: Mapping[str, Any], path: Path) -> None:
    for name in ("module_input_name", "module_output_name"):
        if config.get(name, _SENTENCE) not in (None, _SENTENCE):
            _refuse(path, name, config[name], _SENTENCE)


def _read(path: Path, *, optional: bool = False) -> dict[str, Any]:
    return dict(read_json(path, optional=optional, limit_bytes=_LARGEST_BYTES))


def _read_list(path: Path) -> Sequence[Mapping[str, Any]]:
    """A JSON list of objects, which `read_json` does not read."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            _refuse(path, "", f"{path.stat().st_size:,} bytes", f"at most {_LARGEST_BYTES:,}")
        modules = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        _refuse(path, "", str(error)[:200], "a JSON list of modules", "Fetch it again.")
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        _refuse(path, "", "something else", "a JSON list of modules", "Fetch it again.")
    return modules


def _refuse(path: Path | str, name: str, got: object, expected: str, fix: str = _FIX) -> NoReturn:
    raise CheckpointError(f"{path}: {name}" if name else str(path), got=got, expected=expected, fix=fix)
