"""`genie_config.json` and `htp_backend_ext_config.json`, typed. Genie refuses fields that it does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from devices import Device
from edgekv.bundle import Manifest
from edgekv.machine.decoding import convert
from edgekv.machine.json_file import readable_json
from edgekv.spec import LAYER_INPUTS_PORT, Rope
from edgekv.text import SamplingParams
from quant import Encoding

CONFIG, SHARED_CONFIG, EXTENSIONS = "genie_config.json", "genie_config_shared.json", "htp_backend_ext_config.json"
TABLE, LAYER_TABLE = "embedding_weights.raw", "per_layer_inputs.raw"
ENCODER_BINARY = "vision_encoder.bin"
TEXT_NODE, IMAGE_NODE = "text_encoder.json", "image_encoder.json"
GENERATOR_NODE, SHARED_GENERATOR_NODE = "text_generator.json", "text_generator_shared.json"
NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    pass


class Context(_Part, frozen=True, kw_only=True):
    """Sizes and special tokens; a `bos_token` of -1 means none."""

    version: int = 1
    size: int
    n_vocab: int
    bos_token: int
    eos_token: list[int]
    pad_token: int


class Sampler(_Part, frozen=True, kw_only=True):
    version: int = 1
    seed: int
    temp: float
    top_k: int
    top_p: float
    greedy: bool


class TokenizerFile(_Part, frozen=True, kw_only=True):
    version: int = 1
    path: str


class QnnHtp(_Part, frozen=True, kw_only=True):
    version: int = 1
    use_mmap: bool = True
    spill_fill_bufsize: int = 0
    mmap_budget: int = 0
    poll: bool = False
    cpu_mask: str = "0xe0"
    kv_dim: int
    allow_async_init: bool = False


class Backend(_Part, frozen=True, kw_only=True):
    version: int = 1
    type: Literal["QnnHtp"] = "QnnHtp"
    extensions: str = EXTENSIONS
    qnn_htp: QnnHtp = msgspec.field(name="QnnHtp")


class LoraFiles(_Part, frozen=True, kw_only=True):
    """An adapter: `path` is a folder with a float32 file for each input of the graphs that begins with `lora`."""

    version: int = 1
    name: str
    path: str


class Lora(_Part, frozen=True, kw_only=True):
    """LoRA version 1: the adapters are inputs of the graphs, which Genie fills from files."""

    version: int = 1
    lora_version: Literal[1] = 1
    adapters: list[LoraFiles]


class Binaries(_Part, frozen=True, kw_only=True):
    version: int = 1
    ctx_bins: list[str]
    lora: Lora | UnsetType = UNSET


class RopeScaling(_Part, frozen=True, kw_only=True):
    rope_type: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class _Llama3(msgspec.Struct, frozen=True):
    """The parameters from a bundle."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


class PositionalEncoding(_Part, frozen=True, kw_only=True):
    """`rope_dim` is D/2."""

    type: Literal["rope"] = "rope"
    rope_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | UnsetType = UNSET


class ModelFiles(_Part, frozen=True, kw_only=True):
    """`linear_attention`: layers have states, which Genie moves to the accepted tokens before each pass."""

    version: int = 1
    type: Literal["binary"] = "binary"
    binary: Binaries
    positional_encoding: PositionalEncoding
    linear_attention: bool | UnsetType = UNSET


class Engine(_Part, frozen=True, kw_only=True):
    version: int = 1
    n_threads: int = 3
    backend: Backend
    model: ModelFiles


class TableEncoding(_Part, frozen=True, kw_only=True):
    """`offset` is the zero point, negated."""

    scale: float
    offset: int


class EmbeddingTable(_Part, frozen=True, kw_only=True):
    version: int = 1
    type: Literal["lut"] = "lut"
    lut_path: str
    size: int
    datatype: Literal["ufixed16"] = "ufixed16"
    quant_param: TableEncoding

    @classmethod
    def of(cls, path: str, width: int, encoding: Encoding) -> EmbeddingTable:
        """A table of rows of 16-bit integers."""
        quant_param = TableEncoding(scale=encoding.scale, offset=-encoding.zero_point)
        return cls(lut_path=path, size=width, quant_param=quant_param)


class Debug(_Part, frozen=True, kw_only=True):
    path: str
    dump_specs: bool = False
    dump_tensors: bool = False


class Dialog(_Part, frozen=True, kw_only=True):
    version: int = 1
    type: Literal["basic"] = "basic"
    max_num_tokens: int
    context: Context
    sampler: Sampler
    tokenizer: TokenizerFile
    engine: Engine
    embedding: EmbeddingTable | UnsetType = UNSET
    perlayer_embedding: EmbeddingTable | UnsetType = UNSET
    debug: Debug | UnsetType = UNSET


class GenieConfig(_Part, frozen=True, kw_only=True):
    """The whole file. Paths are relative to the folder; Genie resolves them against its working directory."""

    dialog: Dialog


class EncoderHtp(_Part, frozen=True, kw_only=True):
    version: int = 1
    use_mmap: bool = True
    spill_fill_bufsize: int = 0
    pooled_output: bool = False
    allow_async_init: bool = False


class EncoderBackend(_Part, frozen=True, kw_only=True):
    version: int = 1
    type: Literal["QnnHtp"] = "QnnHtp"
    extensions: str = EXTENSIONS
    qnn_htp: EncoderHtp = msgspec.field(name="QnnHtp", default=EncoderHtp())


class EncoderFiles(_Part, frozen=True, kw_only=True):
    version: int = 1
    type: Literal["binary"] = "binary"
    binary: Binaries = Binaries(ctx_bins=[ENCODER_BINARY])


class EncoderEngine(_Part, frozen=True, kw_only=True):
    """`mode`: without it Genie takes the graph for a decoder, and refuses it."""

    version: int = 1
    n_threads: int = 3
    mode: Literal["image"] = "image"
    backend: EncoderBackend = EncoderBackend()
    model: EncoderFiles = EncoderFiles()


class ImageEncoder(_Part, frozen=True, kw_only=True):
    """A node that turns patches into embeddings. Without `vision-param` Genie takes the graph's shapes as they are."""

    version: int = 1
    type: Literal["image-encoder"] = "image-encoder"
    engine: EncoderEngine = EncoderEngine()


class TableContext(_Part, frozen=True, kw_only=True):
    version: int = 1
    n_vocab: int
    ctx_size: int
    embed_size: int
    pad_token: int


class LookupTable(_Part, frozen=True, kw_only=True):
    version: int = 1
    size: int
    datatype: Literal["ufixed16"] = "ufixed16"
    lut_path: str
    quant_param: TableEncoding


class TextEncoder(_Part, frozen=True, kw_only=True):
    """A node that looks up the embeddings of a text's tokens."""

    version: int = 1
    type: Literal["lut"] = "lut"
    context: TableContext
    tokenizer: TokenizerFile
    lut: LookupTable

    @classmethod
    def of(cls, generator: Dialog) -> TextEncoder:
        """The node for a generator that reads embeddings."""
        table, context = generator.embedding, generator.context
        assert isinstance(table, EmbeddingTable), "it reads embeddings"
        return cls(
            context=TableContext(
                n_vocab=context.n_vocab, ctx_size=context.size, embed_size=table.size, pad_token=context.pad_token
            ),
            tokenizer=generator.tokenizer,
            lut=LookupTable(size=table.size, lut_path=table.lut_path, quant_param=table.quant_param),
        )


class Nodes(_Part, frozen=True, kw_only=True):
    """Nodes of a GeniePipeline, each a file of its own: the encoders are connected to the generator."""

    text_encoder: TextEncoder
    image_encoder: ImageEncoder
    text_generator: Dialog

    @classmethod
    def of(cls, generator: Dialog) -> Nodes:
        """The nodes for a generator."""
        return cls(text_encoder=TextEncoder.of(generator), image_encoder=ImageEncoder(), text_generator=generator)

    def content(self) -> tuple[bytes, bytes, bytes]:
        """What `GenieNodeConfig_createFromJson` takes for each."""
        fields = msgspec.to_builtins(self)
        text, image, generator = (readable_json({name: fields[name]}) for name in fields)
        return text, image, generator


def positional_encoding(rope: Rope, head_dim: int) -> PositionalEncoding:
    """The rotary embedding in Genie's terms; one that `GENIE` can run."""
    half = head_dim // 2
    if rope.rope_type == "default":
        return PositionalEncoding(rope_dim=half, rope_theta=rope.theta)
    scaling = convert(rope.parameters, _Llama3)
    return PositionalEncoding(
        rope_dim=half,
        rope_theta=rope.theta,
        rope_scaling=RopeScaling(
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=round(scaling.original_max_position_embeddings),
        ),
    )


def sampler(sampling: SamplingParams, vocab: int) -> Sampler:
    """Genie has no value for "off": top-k of the whole vocabulary and top-p of 1 exclude nothing."""
    return Sampler(
        seed=sampling.seed or 0,
        temp=1.0 if sampling.greedy else sampling.temperature,
        top_k=1 if sampling.greedy else sampling.top_k or vocab,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        greedy=sampling.greedy,
    )


def genie_config(
    manifest: Manifest,
    binaries: Sequence[str],
    *,
    context: int,
    bos: int | None,
    sampling: SamplingParams,
    max_new_tokens: int,
    table: Encoding | None,
    adapters: Mapping[str, str] = NO_ADAPTERS,
) -> GenieConfig:
    """The configuration that names these binaries.

    Args:
        manifest: of the bundle.
        binaries: file names, in the order of the parts.
        context: the longest to use, in tokens.
        bos: token in front of the first query; None for none.
        sampling: sampling parameters.
        max_new_tokens: the longest answer.
        table: encoding of the embedding table, if Genie looks up embeddings.
        adapters: the folders of their files, by name.
    """
    model = manifest.model
    embedding: EmbeddingTable | UnsetType = UNSET
    if table is not None:
        embedding = EmbeddingTable.of(TABLE, model.hidden, table)
    of_layers: EmbeddingTable | UnsetType = UNSET
    if model.layer_inputs:
        width, encoding = model.layers * model.layer_inputs, manifest.encodings[LAYER_INPUTS_PORT]
        of_layers = EmbeddingTable.of(LAYER_TABLE, width, encoding)
    listed = [LoraFiles(name=name, path=path) for name, path in adapters.items()]
    lora = Lora(adapters=listed) if listed else UNSET
    dialog = Dialog(
        max_num_tokens=max_new_tokens,
        context=Context(
            size=context,
            n_vocab=manifest.model.vocab,
            bos_token=-1 if bos is None else bos,
            eos_token=manifest.tokens.eos,
            pad_token=manifest.tokens.pad or 0,
        ),
        sampler=sampler(sampling, manifest.model.vocab),
        tokenizer=TokenizerFile(path="tokenizer.json"),
        engine=Engine(
            backend=Backend(qnn_htp=QnnHtp(kv_dim=manifest.model.head_dim)),
            model=ModelFiles(
                binary=Binaries(ctx_bins=list(binaries), lora=lora),
                positional_encoding=positional_encoding(manifest.model.rope, manifest.model.head_dim),
                linear_attention=UNSET if manifest.model.convolution is None else True,
            ),
        ),
        embedding=embedding,
        perlayer_embedding=of_layers,
    )
    return GenieConfig(dialog=dialog)


class _Snake(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Core(_Snake, frozen=True, kw_only=True):
    core_id: int = 0
    perf_profile: str = "burst"
    rpc_control_latency: int = 100


class HtpDevice(_Snake, frozen=True, kw_only=True):
    soc_model: int
    dsp_arch: str
    cores: list[Core]


class Memory(_Snake, frozen=True, kw_only=True):
    mem_type: str = "shared_buffer"


class Sharing(_Snake, frozen=True, kw_only=True):
    weight_sharing_enabled: bool = True


class HtpExtensions(_Snake, frozen=True, kw_only=True):
    """`htp_backend_ext_config.json`."""

    devices: list[HtpDevice]
    memory: Memory
    context: Sharing

    @classmethod
    def of(cls, device: Device) -> HtpExtensions:
        target = HtpDevice(soc_model=device.soc_model, dsp_arch=f"v{device.arch}", cores=[Core()])
        return cls(devices=[target], memory=Memory(), context=Sharing())
