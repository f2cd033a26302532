"""What must hold before an export starts."""

from __future__ import annotations

from devices import Device
from edgekv.errors import EngineError, UsageError
from edgekv.plan import check_kernel, checked_ar
from edgekv.plan.options import DEFAULT_AR
from edgekv.qnn import provider as qnn
from edgekv.spec import CHECKPOINT_TOKENS, Config, DecoderSpec, Task, describe
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.locate import find_config
from exporters.checkpoint.lora import Adapter
from exporters.graphs.tflite.limits import check_tflite
from exporters.lora.add import check_fits
from exporters.lora.base import ExportedBase
from exporters.options import ExportOptions


def check_first(checkpoint: str, options: ExportOptions) -> None:
    """Raise what the configuration alone tells, before the weights and the tokenizer are opened.

    Raises:
        UsageError: as `check_cache`.
        EngineError: as `check_compiler`.
        CheckpointError: there is no such checkpoint, or it cannot be exported.
    """
    check_compiler(options)
    if "://" not in checkpoint:  # a URL is fetched as a whole
        check_cache(describe(Config(find_config(checkpoint))), options)


def check_compiler(options: ExportOptions) -> None:
    """Raise before any work if the last step needs a compiler that is not installed.

    Raises:
        EngineError: the compiler is missing; the fix names the option to skip it.
    """
    if options.graph_format != "onnx" or not options.check_on_htp:
        return
    try:
        qnn.compiler()
    except EngineError as error:
        fix = f"{error.fix}. Or export without the check: --skip-htp-check"
        raise EngineError("HTP check", got=error.got, expected=error.expected, fix=fix) from None


def check_cache(spec: DecoderSpec, options: ExportOptions) -> None:
    """Reject contexts and AR numbers for which there is no cache.

    Raises:
        UsageError: naming the option.
    """
    context, largest = options.contexts[-1], max(options.ar)
    if too_narrow := [window for window in options.max_attention_window if window <= largest]:
        raise UsageError(
            "--max-attention-window",
            got=too_narrow[0],
            expected=f"more than the largest AR, {largest}",
            fix="Use a wider window, or a smaller --ar.",
        )
    if not spec.bidirectional:
        checked_ar(tuple(options.ar), context, spec.windows_in(context))
    elif tuple(options.ar) not in ((1,), DEFAULT_AR):
        got = f"{','.join(map(str, options.ar))}, for a model whose tokens attend to both sides"
        raise UsageError("--ar", got=got, expected="the lengths of its graphs as --context", fix="Leave it out.")
    if context > spec.max_positions:
        raise UsageError(
            "--context",
            got=context,
            expected=f"at most {spec.bound_by} = {spec.max_positions} of the checkpoint",
            fix=f"Use --context {spec.max_positions // largest * largest}.",
        )
    check_kernel(spec, options.contexts[0])


ENCODER_PRODUCTS = "V73 or later: products of a vision encoder's attention read 16-bit integers"


def check_fit(checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Reject options that do not fit this checkpoint.

    Raises:
        UsageError: naming the option.
        CheckpointError: an adapter to calibrate on does not fit.
    """
    spec = checkpoint.spec
    if checkpoint.task is not None:
        _check_task(checkpoint.task, options)
    if options.state_bits != 16 and not spec.has_states:
        got, expected = f"{options.state_bits} for a checkpoint without states", "one with short convolutions"
        raise UsageError("--state-bits", got=got, expected=expected, fix="Leave it out.")
    check_cache(spec, options)
    if spec.delta_rule is not None:
        _check_delta_rule(options, spec.delta_rule.noun)
    if spec.bidirectional:
        _check_whole_texts(options)
    options.recipe.check(spec)
    if options.lora is not None and (spec.layer_sizes or spec.cache_owners):
        raise UsageError(
            "--lora-slots",
            got="layers that differ in size or share a cache",
            expected="layers of one size, which slots are made for",
            fix="Merge the adapter: --lora FOLDER.",
        )
    if spec.experts is not None:
        _check_experts(options)
    if options.lora is not None and spec.norm_biases:
        raise UsageError(
            "--lora-slots",
            got="norms with biases",
            expected="norms without: the biases that an adapter reads are in the base model's own",
            fix="Merge the adapter: --lora FOLDER.",
        )
    if options.lora is not None:
        for choice in options.lora.calibrate:
            check_fits(Adapter.open(choice), ExportedBase(checkpoint, checkpoint), options.lora.slots(spec))
    if options.give_hidden and options.graph_format == "tflite":
        fix = "Leave it out, or use --format onnx."
        raise UsageError("--give-hidden", got="it with --format tflite", expected="ONNX graphs", fix=fix)
    if options.graph_format == "tflite":
        check_tflite(checkpoint)


def check_encoder_fits(device: Device) -> None:
    """Check that a chip can run a vision encoder.

    Raises:
        UsageError: it cannot.
    """
    if not device.supports_kv("s16"):
        raise UsageError(
            "--device",
            got=f"{device.soc} (V{device.arch})",
            expected=ENCODER_PRODUCTS,
            fix="Use a later device, such as SM8550.",
        )


def _check_task(task: Task, options: ExportOptions) -> None:
    """Check that nothing is asked for that needs a head for text.

    Raises:
        UsageError: naming the option.
    """
    asked = {
        "--target-mb, --max-kl, --target-tokens-per-s, mean_bits": options.allocates,
        "--give-hidden": options.give_hidden,
        "--draft-rows": bool(options.verify_rows),
        "--lora-slots": options.lora is not None,
    }
    if refused := [option for option, is_given in asked.items() if is_given]:
        expected = "a checkpoint that writes text"
        raise UsageError(refused[0], got=f"it, for {task.noun}", expected=expected, fix="Leave it out.")


def _check_whole_texts(options: ExportOptions) -> None:
    """Check that nothing is asked for that needs a cache of earlier tokens.

    Raises:
        UsageError: naming the option.
    """
    asked = {"--sink": options.sink.mode == "tokens", "--max-attention-window": bool(options.max_attention_window)}
    if refused := [option for option, is_given in asked.items() if is_given]:
        got = "it, for a model whose tokens attend to both sides"
        raise UsageError(refused[0], got=got, expected="none: nothing is cached", fix="Leave it out.")


def _check_experts(options: ExportOptions) -> None:
    """Check that nothing is asked for that graphs with experts cannot have.

    Raises:
        UsageError: naming the option.
    """
    if options.graph_format == "tflite":
        raise UsageError(
            "--format", got="tflite, for a checkpoint with experts", expected="onnx", fix="Use --format onnx."
        )
    if options.lora is not None:
        raise UsageError(
            "--lora-slots",
            got="slots, for a checkpoint with experts",
            expected="none: adapters of experts have no inputs",
            fix="Leave it out.",
        )


def _check_delta_rule(options: ExportOptions, noun: str) -> None:
    """Check that the target and the options can have a gated delta rule or Mamba-2, whose name in messages is `noun`.

    Raises:
        UsageError: naming the option.
    """
    if options.graph_format == "tflite":
        raise UsageError(
            "--format",
            got=f"tflite, for a checkpoint with {noun}",
            expected="onnx",
            fix="Use --format onnx.",
        )
    if not options.device.supports_kv("s16"):
        raise UsageError(
            "--device",
            got=f"{options.device.soc} (V{options.device.arch})",
            expected=f"V73 or later: products of {noun} read 16-bit integers",
            fix="Use a later device, such as SM8550.",
        )
    if max(options.ar) > CHECKPOINT_TOKENS:
        raise UsageError(
            "--ar",
            got=max(options.ar),
            expected=f"at most {CHECKPOINT_TOKENS} with {noun}, whose steps end at multiples of it",
            fix=f"Use --ar 1,{CHECKPOINT_TOKENS}.",
        )
    if options.lora is not None:
        raise UsageError(
            "--lora-slots",
            got=f"slots, for a checkpoint with {noun}",
            expected="none: adapters of its projections have no inputs yet",
            fix="Merge an adapter with --lora.",
        )
    if options.state_bits != 16:
        raise UsageError(
            "--state-bits",
            got=options.state_bits,
            expected=f"16 for a checkpoint with {noun}",
            fix="Leave it out.",
        )
    if options.sink.mode == "tokens":
        raise UsageError(
            "--sink",
            got=f"token ids, for a checkpoint with {noun}",
            expected="none, since their states hold every token",
            fix="Leave it out.",
        )
