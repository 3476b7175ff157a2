"""The image encoder of a GGUF model: a sidecar, mmproj-NAME.gguf, in the model's folder.

Its settings and those of the model's file become one config.json. Missing settings get the values
of the released checkpoints. docs/gguf-images.md has the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.gguf.header import Header, StoredTensor
from engine.errors import ConfigError

Settings = Mapping[str, Any]
Config = dict[str, Any]
PROJECTOR, VISION = "clip.projector_type", "clip.vision."
HIDDEN, EPSILON = "embedding_length", "attention.layer_norm_epsilon"
DEEP_LAYERS = "is_deepstack_layers"
FIRST_FRAME, SECOND_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
# Of released SmolVLM and Idefics3: the longest edge of a picture is four tiles.
TILES_OF_EDGE = 4
GEMMA3_POOL = 4
QWEN25_WINDOW = 112  # pixels
# Areas of Qwen's pictures in pixels: those of the preprocessor_config.json of Qwen2.5-VL and of
# Qwen3-VL. llama.cpp allows 8 to 4,096 tokens for both.
QWEN25_AREA, QWEN3_AREA = (56 * 56, 12_845_056), (65_536, 16_777_216)
QWEN_EPSILON = 1e-6  # fixed in the model; the converter writes that of the language model
# Keys of `clip.vision.` that all sidecars of the converter have.
ALWAYS = (
    "image_size",
    "patch_size",
    HIDDEN,
    "block_count",
    "attention.head_count",
    EPSILON,
    "image_mean",
    "image_std",
)
SIZES = ("feed_forward_length", "projection_dim")  # those of the tensors count
SCALE, MERGE = "projector.scale_factor", "spatial_merge_size"
MIN_AREA, MAX_AREA = "image_min_pixels", "image_max_pixels"
# Keys of `clip.` with the values that have no effect here.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "has_vision_encoder": (True,),
    "has_audio_encoder": (False,),
    "has_text_encoder": (False,),
    "has_llava_projector": (False, True),
}


@dataclass(frozen=True, slots=True)
class Encoder:
    """The contents of a projector's sidecars, and their form in a checkpoint.

    `prefix` begins the names of the language model's tensors in the checkpoint. `output` is the
    tensor whose dimension `axis` is the width of an embedding. `up` is the first layer of an MLP.
    """

    architecture: str  # of the model's file
    class_name: str
    prefix: str
    output: str
    axis: int
    keys: tuple[str, ...]  # of clip.vision, besides ALWAYS and SIZES
    config: Callable[[Header], tuple[Config, Config]]  # config.json, the image processor's
    activation: str  # the key of `clip.` that must be true


def projector_of(settings: Settings) -> str:
    """Return the projector of a sidecar, "unknown" if it names none."""
    name = settings.get(PROJECTOR) or settings.get("clip.vision.projector_type")
    return name if isinstance(name, str) else "unknown"


def is_image_encoder(settings: Settings) -> bool:
    """Return whether a file holds an image encoder. Old ones have no general.type."""
    return settings.get("general.architecture") == "clip"


def count_of(settings: Settings, key: str, default: int | None = None) -> int:
    """Return a number of clip.vision. Raises ConfigError unless it is a whole one above 0."""
    value = settings.get(VISION + key, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise ConfigError(
            f"The image encoder has {VISION}{key} = {value!r:.99}; it must be a whole number "
            "above 0."
        )
    return value


def deep_layers(settings: Settings) -> list[int]:
    """Return the layers of the tower whose hidden states become further embeddings."""
    given = settings.get(VISION + DEEP_LAYERS, [])
    if not isinstance(given, list) or not all(isinstance(each, bool) for each in given):
        raise ConfigError(
            f"The image encoder has {VISION}{DEEP_LAYERS} = {given!r:.99}; it must be a list of "
            "true and false."
        )
    return [layer for layer, is_deep in enumerate(given) if is_deep]


def shape_of(header: Header, name: str, dimensions: int = 2) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises ConfigError if it is missing or of another rank."""
    stored: StoredTensor | None = header.tensors.get(name)
    if stored is None:
        raise ConfigError(f"The image encoder lacks the tensor {name}.")
    if len(stored.shape) != dimensions:
        raise ConfigError(
            f"{name} in {stored.file} has the shape {list(stored.shape)}; it should have "
            f"{dimensions} dimensions."
        )
    return stored.shape


def check_settings(settings: Settings, encoder: Encoder) -> None:
    """Raise ConfigError for a setting that is missing, or that is not computed."""
    if missing := [key for key in ALWAYS if VISION + key not in settings]:
        raise ConfigError(f"The image encoder lacks {VISION}{missing[0]}; convert it again.")
    known = {VISION + key for key in (*ALWAYS, *SIZES, *encoder.keys, "projector_type")}
    for key, value in settings.items():
        part = key.removeprefix("clip.")
        if part == key or key in known or key == PROJECTOR or value in NEUTRAL.get(part, ()):
            continue
        if part in ("use_gelu", "use_silu") and value == (part == encoder.activation):
            continue
        raise ConfigError(
            f"The image encoder sets {key} to {value!r:.99}, which Penstock does not compute for "
            f"the projector {projector_of(settings)}."
        )
    if settings.get(f"clip.{encoder.activation}") is not True:
        raise ConfigError(
            f"The image encoder lacks clip.{encoder.activation}: its activation is another one "
            f"than that of the projector {projector_of(settings)}."
        )


def encoder_notes(settings: Settings) -> list[str]:
    """Return what a user should know of settings that are not computed as they are."""
    given, projector = settings[VISION + EPSILON], projector_of(settings)
    used = epsilon_of(settings)
    if math.isclose(given, used, rel_tol=1e-6):
        return []
    return [
        f"{VISION}{EPSILON} {given:.2g} of the image encoder ({projector}) is ignored: it is "
        f"{used:.0e} in these models"
    ]


def epsilon_of(settings: Settings) -> float:
    """Return the epsilon of the tower's norms."""
    given = settings[VISION + EPSILON]
    if type(given) is not float or not 0 < given < 1:
        raise ConfigError(
            f"The image encoder has {VISION}{EPSILON} = {given!r:.99}; it must be a number between "
            "0 and 1."
        )
    return QWEN_EPSILON if projector_of(settings).startswith("qwen") else float(given)


# ---- projectors ------------------------------------------------------------------------------


def _inner(header: Header) -> int:
    """Return the inner size of an MLP: old converters wrote 0, and exchanged the two layers."""
    hidden = count_of(header.settings, HIDDEN)
    shape = shape_of(header, "v.blk.0.ffn_up.weight")
    return shape[1] if shape[0] == hidden else shape[0]


def _normalization(settings: Settings) -> Config:
    return {key: settings[VISION + key] for key in ("image_mean", "image_std")}


def _siglip(header: Header) -> Config:
    settings = header.settings
    return {
        "hidden_size": count_of(settings, HIDDEN),
        "intermediate_size": _inner(header),
        "num_hidden_layers": count_of(settings, "block_count"),
        "num_attention_heads": count_of(settings, "attention.head_count"),
        "image_size": count_of(settings, "image_size"),
        "patch_size": count_of(settings, "patch_size"),
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": epsilon_of(settings),
    }


def _idefics3(header: Header) -> tuple[Config, Config]:
    settings = header.settings
    edge, scale = count_of(settings, "image_size"), count_of(settings, SCALE, 2)
    side = edge // count_of(settings, "patch_size") // scale
    longest = count_of(settings, "preproc_image_size", TILES_OF_EDGE * edge)
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": edge},
        **_normalization(settings),
    }
    config = {"vision_config": _siglip(header), "scale_factor": scale}
    return config, {"image_seq_len": side**2, "image_processor": processor}


def _gemma3(header: Header) -> tuple[Config, Config]:
    settings = header.settings
    edge, pool = count_of(settings, "image_size"), count_of(settings, SCALE, GEMMA3_POOL)
    tokens = (edge // count_of(settings, "patch_size") // pool) ** 2
    vision = _siglip(header) | {"model_type": "siglip_vision_model"}
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": edge, "width": edge},
        **_normalization(settings),
    }
    config = {"vision_config": vision, "mm_tokens_per_image": tokens}
    return config, {"image_seq_length": tokens, "image_processor": processor}


def _qwen(header: Header, area: tuple[int, int]) -> tuple[Config, Config]:
    """Return what the two towers share. `area` are a picture's smallest and largest."""
    settings = header.settings
    shape_of(header, SECOND_FRAME, 4)
    patch, merge = count_of(settings, "patch_size"), count_of(settings, MERGE, 2)
    vision = {
        "depth": count_of(settings, "block_count"),
        "hidden_size": count_of(settings, HIDDEN),
        "intermediate_size": _inner(header),
        "num_heads": count_of(settings, "attention.head_count"),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
        "out_hidden_size": shape_of(header, "mm.2.weight")[0],
    }
    smallest, largest = area
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 2,
        "size": {
            "shortest_edge": count_of(settings, MIN_AREA, smallest),
            "longest_edge": count_of(settings, MAX_AREA, largest),
        },
        **_normalization(settings),
    }
    return {"vision_config": vision}, {"image_processor": processor}


def _qwen25(header: Header) -> tuple[Config, Config]:
    config, processor = _qwen(header, QWEN25_AREA)
    vision, period = config["vision_config"], count_of(header.settings, "n_wa_pattern")
    vision |= {
        "hidden_act": "silu",
        "window_size": count_of(header.settings, "window_size", QWEN25_WINDOW),
        "fullatt_block_indexes": list(range(period - 1, vision["depth"], period)),
    }
    return config, processor


def _qwen3(header: Header) -> tuple[Config, Config]:
    config, processor = _qwen(header, QWEN3_AREA)
    config["vision_config"] |= {
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": shape_of(header, "v.position_embd.weight")[0],
        "deepstack_visual_indexes": deep_layers(header.settings),
    }
    return config, processor


# clip.projector_type -> what its sidecars hold.
ENCODERS: Mapping[str, Encoder] = {
    "idefics3": Encoder(
        architecture="llama",
        class_name="Idefics3ForConditionalGeneration",
        prefix="model.text_model.",
        output="mm.model.fc.weight",
        axis=0,
        keys=(SCALE, "preproc_image_size"),
        config=_idefics3,
        activation="use_gelu",
    ),
    "gemma3": Encoder(
        architecture="gemma3",
        class_name="Gemma3ForConditionalGeneration",
        prefix="language_model.model.",
        output="mm.input_projection.weight",
        axis=1,
        keys=(SCALE,),
        config=_gemma3,
        activation="use_gelu",
    ),
    "qwen2.5vl_merger": Encoder(
        architecture="qwen2vl",
        class_name="Qwen2_5_VLForConditionalGeneration",
        prefix="model.",
        output="mm.2.weight",
        axis=0,
        keys=(MERGE, "n_wa_pattern", "window_size", MIN_AREA, MAX_AREA),
        config=_qwen25,
        activation="use_silu",
    ),
    "qwen3vl_merger": Encoder(
        architecture="qwen3vl",
        class_name="Qwen3VLForConditionalGeneration",
        prefix="model.language_model.",
        output="mm.2.weight",
        axis=0,
        keys=(MERGE, DEEP_LAYERS, MIN_AREA, MAX_AREA),
        config=_qwen3,
        activation="use_gelu",
    ),
}
