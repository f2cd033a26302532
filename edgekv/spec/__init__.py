"""Decoders, KV caches and graph interfaces, described once and used by all other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.spec.config import (
        CONFIG as CONFIG,
        Config as Config,
        read_config as read_config,
        read_json as read_json,
    )
    from edgekv.spec.decoder import (
        Convolution as Convolution,
        DecoderSpec as DecoderSpec,
        LayerSizes as LayerSizes,
        Mixer as Mixer,
        SplitChannel as SplitChannel,
        TargetState as TargetState,
        Vocabulary as Vocabulary,
    )
    from edgekv.spec.described import (
        CacheSpec as CacheSpec,
        describe as describe,
        describe_cache as describe_cache,
        describe_drafter as describe_drafter,
    )
    from edgekv.spec.divided import (
        EXPERT_INPUT as EXPERT_INPUT,
        EXPERT_MATRICES as EXPERT_MATRICES,
        EXPERT_SCALES as EXPERT_SCALES,
        EXPERT_SHARES as EXPERT_SHARES,
        EXPERT_SUM as EXPERT_SUM,
        EXPERTS as EXPERTS,
        DividedPart as DividedPart,
        ExpertMatrix as ExpertMatrix,
        ExpertSteps as ExpertSteps,
        divided_at_routers as divided_at_routers,
        expert_ports as expert_ports,
    )
    from edgekv.spec.encoders import ENCODERS as ENCODERS, encoder_family as encoder_family
    from edgekv.spec.families import ARCHITECTURES as ARCHITECTURES
    from edgekv.spec.folders import FolderKind as FolderKind, identify as identify, is_hub_id as is_hub_id
    from edgekv.spec.geometry import (
        CHECKPOINT_TOKENS as CHECKPOINT_TOKENS,
        KINDS as KINDS,
        CacheResult as CacheResult,
        ConvSpec as ConvSpec,
        DeltaSpec as DeltaSpec,
        KeyLayout as KeyLayout,
        Kind as Kind,
        KvDtype as KvDtype,
        KvTensor as KvTensor,
        LayerSpec as LayerSpec,
        RowSpec as RowSpec,
    )
    from edgekv.spec.graph import (
        CONV_ROWS as CONV_ROWS,
        FINAL_NORM_RESULT as FINAL_NORM_RESULT,
        LAST_HIDDEN as LAST_HIDDEN,
        LAYER_INPUTS_PORT as LAYER_INPUTS_PORT,
        LOGITS_INDEX as LOGITS_INDEX,
        MASK as MASK,
        ROPE_SUFFIXES as ROPE_SUFFIXES,
        STEP_KINDS as STEP_KINDS,
        TARGET_HIDDEN as TARGET_HIDDEN,
        TARGET_OUT_RESULT as TARGET_OUT_RESULT,
        DecoderInterface as DecoderInterface,
        RotaryInputs as RotaryInputs,
        mask_name as mask_name,
        rope_inputs as rope_inputs,
    )
    from edgekv.spec.layers import (
        ConvolutionStates as ConvolutionStates,
        Geometry as Geometry,
        LayeredGeometry as LayeredGeometry,
    )
    from edgekv.spec.linear import DeltaRule as DeltaRule
    from edgekv.spec.lora import (
        LORA_A as LORA_A,
        LORA_GROUPS as LORA_GROUPS,
        LORA_PREFIX as LORA_PREFIX,
        LORA_TARGETS as LORA_TARGETS,
        STACK as STACK,
        LoraGroup as LoraGroup,
        LoraSlot as LoraSlot,
        LoraSlots as LoraSlots,
        LoraTarget as LoraTarget,
        lora_a as lora_a,
        lora_added as lora_added,
        lora_b as lora_b,
        lora_group as lora_group,
        lora_reach as lora_reach,
    )
    from edgekv.spec.parts import (
        EMBEDDINGS as EMBEDDINGS,
        IDS as IDS,
        LOGITS as LOGITS,
        GraphRecord as GraphRecord,
        PartRecord as PartRecord,
        Role as Role,
        hidden_name as hidden_name,
    )
    from edgekv.spec.ports import (
        FLOAT as FLOAT,
        OPEN_ROWS as OPEN_ROWS,
        OPEN_TOKENS as OPEN_TOKENS,
        GraphInterface as GraphInterface,
        Port as Port,
        PortKind as PortKind,
        cache_stack as cache_stack,
    )
    from edgekv.spec.results import (
        HEADROOM as HEADROOM,
        PRODUCT_HEADROOM as PRODUCT_HEADROOM,
        RULES as RULES,
        UNOBSERVED as UNOBSERVED,
        EncodingTypes as EncodingTypes,
        Result as Result,
        ResultKind as ResultKind,
        mask_depth as mask_depth,
        mask_encoding as mask_encoding,
        rotary_encoding as rotary_encoding,
    )
    from edgekv.spec.rope import Rope as Rope, Rotation as Rotation
    from edgekv.spec.sizes import (
        FRONT as FRONT,
        HEAD_MARK as HEAD_MARK,
        HEAD_TYPES as HEAD_TYPES,
        MAX_BITS as MAX_BITS,
        MIN_BITS as MIN_BITS,
        RECIPE_TYPES as RECIPE_TYPES,
        Decoder as Decoder,
        Weights as Weights,
        end_layers as end_layers,
        front_bits as front_bits,
        head_type as head_type,
        recipe_weights as recipe_weights,
    )
    from edgekv.spec.task import EmbeddingTask as EmbeddingTask, RankingTask as RankingTask, Task as Task
    from edgekv.spec.tensors import (
        CONVOLUTION_INPUTS as CONVOLUTION_INPUTS,
        DELTA_INPUTS as DELTA_INPUTS,
        EMBEDDING as EMBEDDING,
        EMBEDDING_COLUMNS as EMBEDDING_COLUMNS,
        EMBEDDING_IN as EMBEDDING_IN,
        EMBEDDING_STEPS as EMBEDDING_STEPS,
        FINAL_NORM as FINAL_NORM,
        HEAD as HEAD,
        HEAD_BIAS as HEAD_BIAS,
        HEAD_TURN as HEAD_TURN,
        LAYER_INPUTS as LAYER_INPUTS,
        LAYER_TABLE as LAYER_TABLE,
        LAYER_TABLE_NORM as LAYER_TABLE_NORM,
        LAYER_TABLE_PROJECTION as LAYER_TABLE_PROJECTION,
        PICTURE_PLACES as PICTURE_PLACES,
        TARGET_FRAME as TARGET_FRAME,
        TARGET_IN as TARGET_IN,
        TARGET_OUT as TARGET_OUT,
        XIELU_BETA as XIELU_BETA,
        View as View,
        attention_norm as attention_norm,
        by_inputs as by_inputs,
        by_outputs as by_outputs,
        convolution_kernel as convolution_kernel,
        decoder_tensor as decoder_tensor,
        delta_inputs as delta_inputs,
        delta_kernel as delta_kernel,
        delta_kernel_bias as delta_kernel_bias,
        delta_rates as delta_rates,
        delta_skips as delta_skips,
        delta_spans as delta_spans,
        encoder_tensor as encoder_tensor,
        expert_of as expert_of,
        expert_projection as expert_projection,
        expert_scores as expert_scores,
        feed_forward_norm as feed_forward_norm,
        head_width as head_width,
        layer_of as layer_of,
        layer_scalar as layer_scalar,
        matrices as matrices,
        part_name as part_name,
        router as router,
        stored_name as stored_name,
        table_key as table_key,
        text_tensor as text_tensor,
        views as views,
        xielu_numbers as xielu_numbers,
    )
    from edgekv.spec.vision import (
        CENTER as CENTER,
        COS_PORT as COS_PORT,
        LAST_NORM as LAST_NORM,
        LAST_NORM_BIAS as LAST_NORM_BIAS,
        LAYER_ROWS as LAYER_ROWS,
        LAYER_ROWS_BIAS as LAYER_ROWS_BIAS,
        LAYER_ROWS_NORM as LAYER_ROWS_NORM,
        LAYER_ROWS_PORT as LAYER_ROWS_PORT,
        MERGED_MEANS as MERGED_MEANS,
        PADDING_PORT as PADDING_PORT,
        PATCHES as PATCHES,
        PATCHES_BIAS as PATCHES_BIAS,
        PIXELS_PORT as PIXELS_PORT,
        PLACES_PORT as PLACES_PORT,
        POSITIONS as POSITIONS,
        PROJECTOR as PROJECTOR,
        PROJECTOR_BIAS as PROJECTOR_BIAS,
        PROJECTOR_OUT as PROJECTOR_OUT,
        PROJECTOR_OUT_BIAS as PROJECTOR_OUT_BIAS,
        ROWS_PORT as ROWS_PORT,
        SIN_PORT as SIN_PORT,
        TABLE as TABLE,
        Bound as Bound,
        EncoderSpec as EncoderSpec,
        LayerRows as LayerRows,
        PictureShapes as PictureShapes,
        PictureSpec as PictureSpec,
        bias_of as bias_of,
        deepstack_fc1 as deepstack_fc1,
        deepstack_fc2 as deepstack_fc2,
        deepstack_port as deepstack_port,
        low_of as low_of,
        mean_of as mean_of,
    )

__getattr__, __all__ = lazy(__name__, __file__)
