"""nano-edgekv: from a checkpoint to text on static integer graphs, in one file.

    python docs/tour/nano_edgekv.py "def main("

It reads a Llama checkpoint, quantizes it, builds static graphs with single-head attention, owns the KV cache whose left
shift is pointer arithmetic, and generates. docs/tour/index.md leads from each part to the file that does it properly.
"""

import json
import re
import struct
import sys
from functools import partialmethod
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

CHECKPOINT = Path(__file__).parents[2] / "models" / "stdlib-4m"
S = 256  # context length: tokens that attention can see, the new ones included
PREFILL = 32  # AR of the graph that reads the prompt: new tokens per inference. The graph that decodes has AR 1.
MASKED = -50.0  # added to the scores of rows that a token must not see

# ---------------------------------------------------------------------------------------------------------------------
# 1. The checkpoint: a JSON header, then the bytes of all tensors.


class Checkpoint:
    """A Llama in the files that transformers writes: config.json and model.safetensors in bfloat16."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.hidden = config["num_hidden_layers"], config["hidden_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        self.bos, self.eos = config["bos_token_id"], config["eos_token_id"]
        self.theta = config["rope_parameters"]["rope_theta"]

        raw = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        self.tensors = {}
        for name in header.keys() - {"__metadata__"}:
            begin, end = header[name]["data_offsets"]
            # A bfloat16 is the upper half of a float32.
            halves = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
            self.tensors[name] = halves.view(np.float32).reshape(header[name]["shape"])
        for name in self.tensors:
            if "q_proj" in name:  # the scale of scores, 1 / sqrt(D), is part of the queries' weights
                self.tensors[name] = self.tensors[name] * np.float32(self.head_dim**-0.5)

    def rotary(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of the rotary embedding, `[tokens, D/2]` each."""
        frequencies = self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = positions[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# 2. The tokenizer: byte-level BPE.


class Tokenizer:
    """Text is cut into words; within each, adjacent tokens are merged in the order in which pairs were learned."""

    # The file's own pattern, with Python's classes of letters and numbers.
    words = re.compile(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?[^\W\d_]+|\d{1,3}| ?(?:[^\s\w]|_)+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def __init__(self, file: Path) -> None:
        model = json.loads(file.read_text())["model"]
        self.ids = model["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        # The file writes each byte as a printable character: itself where it is one, else one from 256 on.
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        self.character = {byte: chr(byte) for byte in printable}
        self.character |= {byte: chr(256 + index) for index, byte in enumerate(others)}
        self.byte = {character: byte for byte, character in self.character.items()}
        self.tokens = {index: token for token, index in self.ids.items()}

    def encode(self, text: str) -> list[int]:
        return [self.ids[token] for word in self.words.findall(text) for token in self.merged(word)]

    def merged(self, word: str) -> list[str]:
        tokens = [self.character[byte] for byte in word.encode()]
        while True:
            learned = [(self.ranks[pair], at) for at, pair in enumerate(pairwise(tokens)) if pair in self.ranks]
            if not learned:
                return tokens
            _, at = min(learned)
            tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]

    def decode(self, ids: list[int]) -> str:
        return bytes(self.byte[character] for index in ids for character in self.tokens[index]).decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# 3. The decoder, written once. `ops` is numpy in float32, or a builder of integer graphs.


def decoder(ops, model: Checkpoint, x):
    """Logits of one step. Every head is on its own: its matrices, its cache, its scores, its softmax."""
    group = model.heads // model.kv_heads
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        inputs, attended = ops.norm(x, at + "input_layernorm.weight"), []
        for kv in range(model.kv_heads):
            new_key = rotated(ops, ops.linear(inputs, at + "self_attn.k_proj.weight", kv))
            new_value = ops.linear(inputs, at + "self_attn.v_proj.weight", kv)
            keys = ops.append(new_key, f"key_{layer}", kv)
            values = ops.append(new_value, f"value_{layer}", kv)
            for head in range(kv * group, (kv + 1) * group):
                query = rotated(ops, ops.linear(inputs, at + "self_attn.q_proj.weight", head))
                scores = ops.add(ops.scores(query, keys), ops.mask)
                attended.append(ops.attend(ops.softmax(scores), values))
        x = ops.add(x, ops.linear(ops.join(attended), at + "self_attn.o_proj.weight"))
        inputs = ops.norm(x, at + "post_attention_layernorm.weight")
        gate, up = (ops.linear(inputs, f"{at}mlp.{name}_proj.weight") for name in ("gate", "up"))
        inner = ops.multiply(ops.multiply(gate, ops.sigmoid(gate)), up)
        x = ops.add(x, ops.linear(inner, at + "mlp.down_proj.weight"))
    return ops.linear(ops.norm(x, "model.norm.weight"), "model.embed_tokens.weight")


def rotated(ops, x):
    """The rotary embedding of a head: elements i and i + D/2 are turned by the angle of their frequency."""
    a, b = ops.split(x)
    turned = ops.subtract(ops.multiply(a, ops.cos), ops.multiply(b, ops.sin))
    return ops.join([turned, ops.add(ops.multiply(b, ops.cos), ops.multiply(a, ops.sin))])


class Floats:
    """The operations in float32 over a whole text. The range of each result is observed, in the order of results."""

    def __init__(self, model: Checkpoint, tokens: int) -> None:
        self.model = model
        self.ranges, self.cache_ranges = [], {}
        self.cos, self.sin = model.rotary(np.arange(tokens))
        self.mask = np.triu(np.full((tokens, tokens), MASKED, np.float32), 1)

    def seen(self, x):
        self.ranges.append((float(x.min()), float(x.max())))
        return x

    def linear(self, x, weight, head=None):
        return self.seen(x @ self.rows(weight, head).T)

    def rows(self, weight, head):
        """The rows of a matrix `[outputs, inputs]` that belong to a head."""
        width, matrix = self.model.head_dim, self.model.tensors[weight]
        return matrix if head is None else matrix[head * width : (head + 1) * width]

    def norm(self, x, weight):
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.model.eps)
        return self.seen(x / rms * self.model.tensors[weight])

    def append(self, new, name, head):
        self.cache_ranges[name] = max(self.cache_ranges.get(name, 0.0), float(np.abs(new).max()))
        return new  # nothing is past: the text is read at once

    def split(self, x):
        return [self.seen(half) for half in np.split(x, 2, axis=-1)]

    def join(self, parts):
        return self.seen(np.concatenate(parts, axis=-1))

    def softmax(self, x):
        powers = np.exp(x - x.max(axis=-1, keepdims=True))
        return self.seen(powers / powers.sum(axis=-1, keepdims=True))

    def apply(self, function, *inputs):
        return self.seen(function(*inputs))

    add, subtract = partialmethod(apply, np.add), partialmethod(apply, np.subtract)
    multiply, sigmoid = partialmethod(apply, np.multiply), partialmethod(apply, lambda x: 1 / (1 + np.exp(-x)))
    scores = partialmethod(apply, lambda query, keys: query @ keys.T)
    attend = partialmethod(apply, np.matmul)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Quantization: a real number is (integer - zero point) * scale.


def encoding(low: float, high: float) -> tuple[np.float32, np.uint16]:
    """Scale and zero point of uint16 activations between two numbers; 0 is exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max(high - low, 1e-6) / 65535
    return np.float32(scale), np.uint16(round(-low / scale))


def quantize(x: np.ndarray, scale: np.float32, zero: np.uint16) -> np.ndarray:
    return np.clip(np.rint(x / scale) + zero, 0, 65535).astype(np.uint16)


def quantized_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 `[outputs, inputs]` with a scale for each output; `[outputs]`."""
    scales = np.maximum(np.abs(matrix).max(axis=1), 1e-9) / 127
    return np.rint(matrix / scales[:, None]).astype(np.int8), scales.astype(np.float32)


class Graph(Floats):
    """The operations as nodes of an ONNX graph for AR new tokens. Each result is quantized with its observed range.

    Between QuantizeLinear and DequantizeLinear every result is an integer; a compiler for the NPU computes with those.
    A cache tensor is an input for P = S - AR past rows and an output for AR new rows. Both have one encoding, uint8
    with zero point 128, which all heads of a layer share: no row is quantized twice.
    """

    def __init__(self, model: Checkpoint, observed: Floats, ar: int) -> None:
        self.model, self.ar, self.observed = model, ar, iter(observed.ranges)
        self.cache_scales = {name: np.float32(high / 127) for name, high in observed.cache_ranges.items()}
        self.nodes, self.constants, self.inputs, self.outputs = [], {}, [], []
        embeddings, half = model.tensors["model.embed_tokens.weight"], model.head_dim // 2
        self.encodings = {
            "inputs_embeds": encoding(embeddings.min(), embeddings.max()),
            "attention_mask": encoding(MASKED, 0.0),
            "position_ids_cos": encoding(-1.0, 1.0),
            "position_ids_sin": encoding(-1.0, 1.0),
        }
        widths = [model.hidden, S, half, half]
        hidden, self.mask, self.cos, self.sin = map(self.activation, self.encodings, widths)
        logits = decoder(self, model, hidden)
        self.node("Identity", [logits + ".u16"], "logits")
        self.outputs.append(self.tensor("logits", TensorProto.UINT16, ar, len(embeddings)))

    def session(self) -> onnxruntime.InferenceSession:
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # matrices are small
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def tensor(self, name, dtype, rows, width):
        return helper.make_tensor_value_info(name, dtype, [1, 1, rows, width])

    def activation(self, name, width):
        self.inputs.append(self.tensor(name, TensorProto.UINT16, self.ar, width))
        return self.dequantized(name, name + ".f32", *self.encodings[name])

    def node(self, operation, inputs, *names, **attributes):
        self.nodes.append(helper.make_node(operation, inputs, names, **attributes))
        return names[0]

    def constant(self, name, value):
        self.constants[name] = value
        return name

    def quantized(self, x, name, scale, zero):
        encoding = [self.constant(name + ".scale", scale), self.constant(name + ".zero", zero)]
        return self.node("QuantizeLinear", [x, *encoding], name)

    def dequantized(self, x, name, scale, zero, **attributes):
        encoding = [self.constant(name + ".scale", scale), self.constant(name + ".zero", zero)]
        return self.node("DequantizeLinear", [x, *encoding], name, **attributes)

    def seen(self, x):
        scale, zero = encoding(*next(self.observed))
        name = f"result_{len(self.nodes)}"
        return self.dequantized(self.quantized(x, name + ".u16", scale, zero), name, scale, zero)

    def apply(self, operation, *inputs, **attributes):
        return self.seen(self.node(operation, inputs, f"float_{len(self.nodes)}", **attributes))

    def linear(self, x, weight, head=None):
        integers, scales = quantized_rows(self.rows(weight, head))
        name = weight if head is None else f"{weight}.h{head}"
        self.constant(name + ".int8", integers.T.copy())
        matrix = self.dequantized(name + ".int8", name, scales, np.zeros(len(scales), np.int8), axis=1)
        return self.apply("MatMul", x, matrix)

    def norm(self, x, weight):
        gamma = self.constant(weight, self.model.tensors[weight])
        return self.apply("RMSNormalization", x, gamma, axis=-1, epsilon=self.model.eps)

    def append(self, new, name, head):
        """Past and new rows of a cache tensor, `[1, 1, S, D]`."""
        encoding, width = (self.cache_scales[name], np.uint8(128)), self.model.head_dim
        past, out = f"past_{name}_h{head}_in", f"past_{name}_h{head}_out"
        self.inputs.append(self.tensor(past, TensorProto.UINT8, S - self.ar, width))
        self.outputs.append(self.tensor(self.quantized(new, out, *encoding), TensorProto.UINT8, self.ar, width))
        rows = self.node("Concat", [past, out], f"{name}_h{head}.u8", axis=2)
        return self.dequantized(rows, f"{name}_h{head}", *encoding)

    def scores(self, query, keys):
        columns = self.node("Transpose", [keys], f"columns_{len(self.nodes)}", perm=[0, 1, 3, 2])
        return self.apply("MatMul", query, columns)

    def split(self, x):
        halves = [f"split_{len(self.nodes)}_{half}" for half in "ab"]
        self.node("Split", [x], *halves, axis=-1, num_outputs=2)
        return [self.seen(half) for half in halves]

    def join(self, parts):
        return self.apply("Concat", *parts, axis=-1)

    add, subtract = partialmethod(apply, "Add"), partialmethod(apply, "Sub")
    multiply, sigmoid = partialmethod(apply, "Mul"), partialmethod(apply, "Sigmoid")
    softmax, attend = partialmethod(apply, "Softmax", axis=-1), partialmethod(apply, "MatMul")


# ---------------------------------------------------------------------------------------------------------------------
# 5. The cache: graphs have no memory, so the host owns all of it.


class Cache:
    """2(S-1) rows for every cache tensor. Graphs read and write them where they are.

    The newest row is in front of `end`. A graph reads the P rows before it, and writes its new rows behind it. To
    append them, and to shift the window to the left by as many, is to add their number to `end`: nothing is copied
    before S-1 tokens have been appended. Then the window is moved to the beginning, once.
    """

    def __init__(self, names: list[str], width: int, rows: int = 2 * (S - 1)) -> None:
        self.index = {name: index for index, name in enumerate(names)}
        self.memory = np.full((len(names), rows, width), 128, np.uint8)  # 128 is 0.0
        self.end, self.filled, self.copies = S - 1, 0, 0

    def address(self, name: str, offset: int = 0) -> int:
        """Of a row of the window: 0 is behind the newest, -P begins what a graph reads."""
        _, rows, width = self.memory.shape
        return self.memory.ctypes.data + (self.index[name] * rows + self.end + offset) * width

    def make_room(self, ar: int) -> None:
        if self.end + ar > self.memory.shape[1]:
            self.memory[:, : S - 1] = self.memory[:, self.end - (S - 1) : self.end].copy()
            self.end, self.copies = S - 1, self.copies + 1

    def append(self, tokens: int) -> None:
        self.end += tokens
        self.filled += tokens


# ---------------------------------------------------------------------------------------------------------------------
# 6. Generation.


class Model:
    """Two graphs, of AR 1 and of AR 32, on one cache."""

    def __init__(self, folder: Path = CHECKPOINT) -> None:
        self.checkpoint = model = Checkpoint(folder)
        self.tokenizer = Tokenizer(folder / "tokenizer.json")
        text = (folder / "calibration.txt").read_text()[:4000]
        tokens = np.array([model.bos, *self.tokenizer.encode(text)][:S])
        observed = Floats(model, len(tokens))
        decoder(observed, model, model.tensors["model.embed_tokens.weight"][tokens])
        self.graphs = {ar: Graph(model, observed, ar) for ar in (1, PREFILL)}
        self.sessions = {ar: graph.session() for ar, graph in self.graphs.items()}
        integers, scales = quantized_rows(model.tensors["model.embed_tokens.weight"])  # the table is the head's, too
        self.embeddings = integers * scales[:, None]
        names = [f"past_{name}_h{head}" for name in observed.cache_ranges for head in range(model.kv_heads)]
        self.cache = Cache(names, model.head_dim)

    def step(self, tokens: list[int]) -> np.ndarray:
        """Run the tokens, append them to the cache, and return the logits' integers of the last one, `[vocab]`."""
        ar, cache = (1 if len(tokens) == 1 else PREFILL), self.cache
        graph, binding = self.graphs[ar], self.sessions[ar].io_binding()
        padded = np.array([*tokens, *[0] * (ar - len(tokens))])
        cos, sin = self.checkpoint.rotary(cache.filled + np.arange(ar))
        column, row = np.arange(S), np.arange(ar)[:, None]
        oldest = S - ar - min(cache.filled, S - ar)
        mask = np.where((column >= oldest) & (column <= S - ar + row), 0.0, MASKED)
        activations = {
            name: quantize(value, *graph.encodings[name])
            for name, value in zip(graph.encodings, (self.embeddings[padded], mask, cos, sin), strict=True)
        }
        cache.make_room(ar)
        for name, value in activations.items():
            binding.bind_input(name, "cpu", 0, np.uint16, (1, 1, *value.shape), value.ctypes.data)
        for name in cache.index:
            past, new = ((1, 1, rows, self.checkpoint.head_dim) for rows in (S - ar, ar))
            binding.bind_input(name + "_in", "cpu", 0, np.uint8, past, cache.address(name, ar - S))
            binding.bind_output(name + "_out", "cpu", 0, np.uint8, new, cache.address(name))
        logits = np.empty((ar, len(self.embeddings)), np.uint16)
        binding.bind_output("logits", "cpu", 0, np.uint16, (1, 1, *logits.shape), logits.ctypes.data)
        self.sessions[ar].run_with_iobinding(binding)
        cache.append(len(tokens))  # rows of the padding stay behind `end`, and are overwritten
        return logits[len(tokens) - 1]

    def generate(self, prompt: str, max_tokens: int = 48) -> str:
        """The most likely continuation."""
        ids = [self.checkpoint.bos, *self.tokenizer.encode(prompt)]
        for begin in range(0, len(ids), PREFILL):
            logits = self.step(ids[begin : begin + PREFILL])
        new = []
        while len(new) < max_tokens and (token := int(logits.argmax())) != self.checkpoint.eos:
            new.append(token)
            logits = self.step([token])
        return self.tokenizer.decode(new)


if __name__ == "__main__":
    nano = Model()
    print(nano.generate(sys.argv[1] if len(sys.argv) > 1 else "def main("))
    print(f"cache: {nano.cache.memory.nbytes} bytes, moved {nano.cache.copies} times", file=sys.stderr)
