"""Write a checkpoint that sees as a model's GGUF file and its image encoder, mmproj-NAME.gguf.

The names of tensors are those of PyPI's `gguf`, and the settings those of llama.cpp's converter,
whose files `tests/engine/checkpoint/gguf/test_converter_sidecars.py` compares with these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from tests.support.gguf_files import add_tensor, tensors_of, write_gguf
from tests.support.tiny_gguf import add_setting
from tests.support.vision import MEAN, STD

Tensors = Mapping[str, np.ndarray]
IS_TEXT = ("lm_head.", "model.language_model.", "model.text_model.", "language_model.")
PROJECTORS = {
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Qwen2_5_VLForConditionalGeneration": "qwen2.5vl_merger",
    "Qwen3VLForConditionalGeneration": "qwen3vl_merger",
}
ARCHITECTURES = {
    "idefics3": "llama",
    "gemma3": "gemma3",
    "qwen2.5vl_merger": "qwen2vl",
    "qwen3vl_merger": "qwen3vl",
}
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 3)  # of as many blocks
PLAIN_PARTS = ("patch_embd", "position_embd")  # stay F32 in most files


def write_pair(
    target: Path, folder: Path, changed: Mapping[str, Any] | None = None, **tokenizer: Any
) -> Path:
    """Write the checkpoint of `folder` into the folder `target`; return the model's file.

    All matrices are F32. `changed` are settings of the image encoder.
    """
    target.mkdir(exist_ok=True)
    write_sidecar(target / "mmproj-model-F32.gguf", folder, changed=changed)
    return write_text(target / "model.gguf", folder, **tokenizer)


def projector_of(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    return PROJECTORS[config["architectures"][0]]


# ---- the language model ----------------------------------------------------------------------


def write_text(file: Path, folder: Path, template: str | None = None, **tokenizer: Any) -> Path:
    """Write the language model of a checkpoint alone, with a chat template."""
    config = json.loads((folder / "config.json").read_text())
    projector, text = projector_of(folder), dict(config["text_config"])
    architecture = ARCHITECTURES[projector]
    own: dict[str, Any] = {}
    rope = text.get("rope_parameters") or {}
    if sections := rope.get("mrope_section"):
        own["rope.dimension_sections"] = [*sections, 0]
    if projector == "qwen3vl_merger":
        own["n_deepstack_layers"] = len(config["vision_config"]["deepstack_visual_indexes"])
    if period := text.get("sliding_window_pattern"):
        own["attention.sliding_window_pattern"] = period
    alone = file.parent / f"text-of-{file.stem}"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(text))
    tensors = {}
    for name, tensor in tensors_of(folder).items():
        inner = text_name(name, projector)
        if inner is not None:
            tensors[inner] = tensor
    save_file(tensors, alone / "model.safetensors")
    settings: dict[str, Any] = {f"{architecture}.{key}": value for key, value in own.items()}
    if template is not None:
        settings["tokenizer.chat_template"] = template
    return write_gguf(file, alone, architecture, settings=settings, **tokenizer)


def text_name(name: str, projector: str) -> str | None:
    """Return the name of a tensor in a language model alone; None if it is the encoder's."""
    if projector == "qwen2.5vl_merger":
        return None if name.startswith("visual.") else name
    if not name.startswith(IS_TEXT):
        return None
    inner = name.removeprefix("model.").removeprefix("language_model.").removeprefix("text_model.")
    return inner if inner.startswith(("lm_head.", "model.")) else f"model.{inner}"


# ---- the image encoder -----------------------------------------------------------------------


def write_sidecar(
    file: Path, folder: Path, kind: str = "F32", changed: Mapping[str, Any] | None = None
) -> Path:
    """Write the image encoder of a checkpoint. `changed` are settings; None leaves one out."""
    settings = sidecar_settings(folder) | dict(changed or {})
    tensors = sidecar_tensors(folder)
    return write_file(file, settings, tensors, kind)


def write_file(file: Path, settings: Mapping[str, Any], tensors: Tensors, kind: str) -> Path:
    writer = gguf.GGUFWriter(file, "clip")
    for key, value in settings.items():
        if value is not None:
            add_setting(writer, key, value)
    for name, tensor in tensors.items():
        add_tensor(writer, name, tensor, kind_of(name, tensor, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def kind_of(name: str, tensor: np.ndarray, kind: str) -> str:
    """Return the type of a tensor in a file of `kind`. Rows that do not fill blocks are F16."""
    if tensor.ndim < 2 or any(part in name for part in PLAIN_PARTS):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind


def sidecar_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that the converter writes."""
    config = json.loads((folder / "config.json").read_text())
    vision, projector = config["vision_config"], projector_of(folder)
    common = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": projector,
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision.get("num_hidden_layers", vision.get("depth")),
        "clip.vision.attention.head_count": vision.get(
            "num_attention_heads", vision.get("num_heads")
        ),
        "clip.vision.attention.layer_norm_epsilon": float(np.float32(1e-6)),
        "clip.vision.image_mean": list(MEAN),
        "clip.vision.image_std": list(STD),
    }
    return common | OWN[projector](config, vision)


def _of_idefics3(config: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.projector.scale_factor": config["scale_factor"],
        "clip.vision.preproc_image_size": 3 * vision["image_size"],
        "clip.use_gelu": True,
    }


def _of_gemma3(config: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    side = vision["image_size"] // vision["patch_size"]
    return {
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.projector.scale_factor": side // int(config["mm_tokens_per_image"] ** 0.5),
        "clip.use_gelu": True,
    }


def _of_qwen25(config: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "clip.vision.image_size": 560,
        "clip.vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1,
        "clip.use_silu": True,
    }


def _of_qwen3(config: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    deep = vision["deepstack_visual_indexes"]
    return {
        "clip.vision.image_size": int(vision["num_position_embeddings"] ** 0.5)
        * vision["patch_size"],
        "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
        "clip.vision.is_deepstack_layers": [n in deep for n in range(vision["depth"])],
        "clip.use_gelu": True,
    }


OWN = {
    "idefics3": _of_idefics3,
    "gemma3": _of_gemma3,
    "qwen2.5vl_merger": _of_qwen25,
    "qwen3vl_merger": _of_qwen3,
}


def sidecar_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the image encoder, as the converter names and changes them."""
    projector = projector_of(folder)
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors_of(folder).items():
        if text_name(name, projector) is None:
            found |= _converted(name, tensor, projector, vision)
    return found


def _converted(
    name: str, tensor: np.ndarray, projector: str, vision: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    name = name.replace("model.visual.", "visual.").replace(
        "input_projection_weight", "input_projection.weight"
    )
    base, _, ending = name.rpartition(".")
    if tensor.ndim == 5:  # a kernel over two frames
        frames = {"v.patch_embd.weight": 0, "v.patch_embd.weight.1": 1}
        return {stored: np.ascontiguousarray(tensor[:, :, n]) for stored, n in frames.items()}
    if base.startswith("visual.deepstack_merger_list."):
        number, part = base.split(".")[2:]
        layer = vision["deepstack_visual_indexes"][int(number)]
        return {f"v.deepstack.{layer}.{part.replace('linear_', '')}.{ending}": tensor}
    if projector == "qwen3vl_merger" and base.startswith("visual.merger."):
        stored = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
        return {f"{stored[base.split('.')[2]]}.{ending}": tensor}
    if projector == "qwen2.5vl_merger" and base.endswith(".qkv"):
        parts = zip("qkv", np.split(tensor, 3), strict=True)
        return {_name(f"{base.removesuffix('qkv')}{part}", ending): rows for part, rows in parts}
    if base.startswith("vision_tower.") and ".vision_model." not in base:
        base = base.replace("vision_tower.", "vision_tower.vision_model.")
    added = 1.0 if base.endswith("soft_emb_norm") else 0.0
    return {_name(base, ending): tensor + np.float32(added)}


def _name(base: str, ending: str) -> str:
    """Return the name in a GGUF file, by PyPI's `gguf`."""
    stored = NAMES.get_name(base)
    assert stored, base
    return f"{stored}.{ending}"
