"""Towers and connectors against those of transformers 5.24, on tiny random checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.checkpoint.weight_map import Names, Target, WeightMap, targets_by_module
from engine.errors import ConfigError
from engine.models.vision.gemma3 import Gemma3Vision, Gemma3VisionConfig, with_projection
from engine.models.vision.gemma4 import Gemma4Vision, Gemma4VisionConfig
from engine.models.vision.idefics3 import Idefics3Vision, Idefics3VisionConfig
from engine.models.vision.llava import LlavaVision, LlavaVisionConfig
from engine.models.vision.qwen2_5 import Qwen25Vision, Qwen25VisionConfig
from engine.models.vision.qwen3 import Qwen3Vision, Qwen3VisionConfig
from engine.protocol.generate import Image
from tests.support.gemma4_images import BUDGET, padded
from tests.support.qwen_images import in_merge_order
from tests.support.vision import Vision, VisionCase, bfloat16, embeddings, picture

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN = 24  # of the language models
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
QWEN = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "spatial_merge_size": 2,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2]}
TEXT_PARTS = ("language_model.", "model.language_model.", "model.text_model.", "lm_head.")


def weight_map(
    names: Names, *prefixes: str, ignored: tuple[str, ...] = ()
) -> Callable[[nn.Module], WeightMap]:
    """Return the map of an encoder alone, whose language model is ignored."""

    def build(module: nn.Module) -> WeightMap:
        targets: dict[str, Target] = with_projection(targets_by_module(module, names))
        return WeightMap(targets, prefixes, ignored_prefixes=(*TEXT_PARTS, *ignored))

    return build


# ---- Idefics3 and SmolVLM --------------------------------------------------------------------


def idefics3(kind: str, scale: int, **vision: Any) -> VisionCase:
    def model() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            text_config={"model_type": "llama", **TEXT},
            vision_config=SIGLIP | vision,
            scale_factor=scale,
            image_token_id=31,
        )
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    def reference(model: Any, numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        parts = model.model.get_image_features(numbers[None]).pooler_output
        return torch.cat(list(parts))

    edge = vision["image_size"]
    return VisionCase(
        f"{kind}-{edge}",
        model,
        lambda config, dtype: Idefics3Vision(
            Idefics3VisionConfig.from_hf(config, HIDDEN), dtype=dtype
        ),
        weight_map(Idefics3Vision.names, "model."),
        reference,
        [(1, edge, edge), (3, edge, edge), (13, edge, edge)],
    )


# ---- Gemma 3 ---------------------------------------------------------------------------------


def gemma3(edge: int, tokens: int) -> VisionCase:
    def model() -> Any:
        from transformers import Gemma3Config, Gemma3ForConditionalGeneration

        vision = SIGLIP | {"image_size": edge, "patch_size": 6, "vision_use_head": False}
        config = Gemma3Config(
            text_config=TEXT,
            vision_config=vision | {"model_type": "siglip_vision_model"},
            mm_tokens_per_image=tokens,
            image_token_index=31,
        )
        return Gemma3ForConditionalGeneration(config)

    def reference(model: Any, numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        return model.model.get_image_features(numbers).pooler_output.flatten(0, 1)

    return VisionCase(
        f"Gemma3-{edge}",
        model,
        lambda config, dtype: Gemma3Vision(Gemma3VisionConfig.from_hf(config, HIDDEN), dtype=dtype),
        weight_map(Gemma3Vision.names, ""),
        reference,
        [(1, edge, edge), (4, edge, edge)],
    )


# ---- Gemma 4 ---------------------------------------------------------------------------------


def gemma4(pool: int, *, is_clipped: bool) -> VisionCase:
    """Return a tower with a norm as its end, or with clipped layers and without."""
    patch = 6

    def model() -> Any:
        from transformers import Gemma4Config, Gemma4ForConditionalGeneration

        vision = SIGLIP | {"num_key_value_heads": 4, "head_dim": 12, "patch_size": patch}
        config = Gemma4Config(
            text_config=TEXT | {"hidden_size_per_layer_input": 0},
            vision_config=vision
            | {"pooling_kernel_size": pool, "position_embedding_size": BUDGET * pool}
            | {"use_clipped_linears": is_clipped, "standardize": not is_clipped},
        )
        made = Gemma4ForConditionalGeneration(config)
        generator = torch.Generator().manual_seed(3)
        for name, buffer in made.model.vision_tower.named_buffers():
            if name.endswith("_min") and "k_proj" not in name:  # the others stay infinite
                buffer.copy_(-0.5 - torch.rand((), generator=generator))
            elif name.endswith("_max") and "up_proj" not in name:
                buffer.copy_(0.5 + torch.rand((), generator=generator))
            elif name.startswith("std_"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
        return made

    def build(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
        processor = config["image_processor"] | {"do_normalize": True, "max_soft_tokens": BUDGET}
        config = config | {"image_processor": processor}
        return Gemma4Vision(Gemma4VisionConfig.from_hf(config, HIDDEN), dtype=dtype)

    def reference(model: Any, numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        pixels, positions = padded(numbers, patch, pool)
        return model.model.get_image_features(pixels, positions).pooler_output[0]

    unit = patch * pool
    return VisionCase(
        f"Gemma4-{'clipped' if is_clipped else 'standardized'}",
        model,
        build,
        weight_map(Gemma4Vision.names, "model."),
        reference,
        [(1, unit * u, unit * v) for u, v in ((1, 1), (3, 4), (1, 12), (5, 2))],
    )


# ---- LLaVA -----------------------------------------------------------------------------------

EDGE = 28  # of a tile
PINPOINTS = [[EDGE * h, EDGE * w] for h in range(1, 5) for w in range(1, 5)]
# Small pictures, thin ones, and one whose embeddings are interpolated.
LLAVA_SIZES = [(30, 30), (33, 91), (100, 41), (200, 199), (7, 300)]


def llava(kind: str, **changed: Any) -> VisionCase:
    is_next = kind == "LlavaNext"

    def model() -> Any:
        import transformers

        tower = "clip_vision_model" if is_next else "siglip_vision_model"
        config = getattr(transformers, f"{kind}Config")(
            text_config={"model_type": "llama" if is_next else "qwen2", **TEXT},
            vision_config=SIGLIP | {"model_type": tower, "image_size": EDGE, "patch_size": 7},
            image_grid_pinpoints=PINPOINTS,
            image_token_index=31,
            **changed,
        )
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    def build(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
        read = LlavaVisionConfig.of_next if is_next else LlavaVisionConfig.of_onevision
        return LlavaVision(read(config, HIDDEN), dtype=dtype)

    def reference(model: Any, numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        sizes = torch.tensor([size[3:5]])
        single = {} if len(numbers) > 1 else {"batch_num_images": torch.tensor([2])}
        if is_next and single:  # it tiles every picture, so one tile takes its own packing
            features = model.model.vision_tower(numbers, output_hidden_states=True)
            hidden = features.hidden_states[model.config.vision_feature_layer][:, 1:]
            projected = model.model.multi_modal_projector(hidden)[0]
            return torch.cat((projected, model.model.image_newline[None]))
        found = model.model.get_image_features(numbers[None], sizes, **single)
        return torch.cat(list(found.pooler_output))

    unused = ("vision_tower.post_layernorm.", "vision_tower.head.")
    if is_next or changed.get("vision_feature_layer"):
        unused += ("vision_tower.encoder.layers.2.",)
    return VisionCase(
        "-".join([kind, *map(str, changed.values())]),
        model,
        build,
        weight_map(LlavaVision.clip_names if is_next else LlavaVision.names, "", ignored=unused),
        reference,
        [(1, EDGE, EDGE, 50, 40, 0, 0), *(with_tiles(size) for size in LLAVA_SIZES)],
        encode=lambda module, pixels, size: module.encode(
            pixels, Image(b"", (), grid=size[5:], size=size[3:5])
        ),
    )


def with_tiles(size: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the tiles of a picture, its size, and its rows and columns of tiles."""
    from transformers.image_processing_utils import select_best_resolution

    height, width = select_best_resolution(size, PINPOINTS)
    rows, columns = height // EDGE, width // EDGE
    return (1 + rows * columns, EDGE, EDGE, *size, rows, columns)


# ---- Qwen ------------------------------------------------------------------------------------


def qwen2_5(window: int, full: list[int]) -> VisionCase:
    patch = 6

    def model() -> Any:
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        config = Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config=QWEN
            | {"patch_size": patch, "window_size": window, "fullatt_block_indexes": full},
        )
        return Qwen2_5_VLForConditionalGeneration(config)

    def reference(model: Any, numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        patches, grid = in_merge_order(numbers, patch)
        return model.model.visual(patches, grid_thw=grid).pooler_output

    return VisionCase(
        f"Qwen2.5-{window}",
        model,
        lambda config, dtype: Qwen25Vision(Qwen25VisionConfig.read(config), dtype=dtype),
        weight_map(Qwen25Vision.names, "visual.", ignored=("model.",)),
        reference,
        # 6 x 5 units have windows of 16, 4, 8 and 2 units.
        [(1, 12 * u, 12 * v) for u, v in ((1, 1), (4, 4), (6, 5), (3, 9), (8, 4))],
    )


def qwen3(deep: list[int] | None) -> VisionCase:
    patch = 8

    def model() -> Any:
        import transformers

        vision = QWEN | {"patch_size": patch, "num_position_embeddings": 49}
        if deep is None:
            text = TEXT | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
            config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
            return transformers.Qwen3_5ForConditionalGeneration(config)
        config = transformers.Qwen3VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config=vision | {"deepstack_visual_indexes": deep},
        )
        return transformers.Qwen3VLForConditionalGeneration(config)

    def reference(model: Any, numbers: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        patches, grid = in_merge_order(numbers, patch)
        found = model.model.visual(patches, grid_thw=grid)
        further = [] if deep is None else found.deepstack_features
        return torch.cat((found.pooler_output, *further), dim=1)

    def build(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
        read = Qwen3VisionConfig.read
        return Qwen3Vision(read(config) if deep is not None else read(config, ()), dtype=dtype)

    return VisionCase(
        "Qwen3.5" if deep is None else f"Qwen3-{len(deep)}",
        model,
        build,
        weight_map(Qwen3Vision.names, "model.visual."),
        reference,
        [(1, 16 * u, 16 * v) for u, v in ((1, 1), (4, 4), (6, 5), (1, 9), (8, 1))],
    )


CASES = [
    idefics3("Idefics3", 2, image_size=24, patch_size=4),
    idefics3("SmolVLM", 4, image_size=50, patch_size=4),
    idefics3("Idefics3", 19, image_size=57, patch_size=3),
    gemma3(50, 4),
    gemma3(54, 9),
    gemma4(3, is_clipped=False),
    gemma4(2, is_clipped=True),
    llava("LlavaOnevision", vision_aspect_ratio="anyres_max_4"),
    llava("LlavaOnevision", vision_feature_layer=2),
    llava("LlavaNext"),
    qwen2_5(48, [1, 3]),
    qwen2_5(30, [2]),
    qwen3([0, 2]),
    qwen3([2, 1]),
    qwen3(None),
]


@pytest.fixture(scope="module")
def visions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[VisionCase], Vision]:
    pytest.importorskip("transformers")
    return cache(lambda case: Vision(case, tmp_path_factory.mktemp(case.name)))


@pytest.fixture
def vision(request: pytest.FixtureRequest, visions: Callable[[VisionCase], Vision]) -> Vision:
    return visions(request.param)


every_case = pytest.mark.parametrize("vision", CASES, indirect=True, ids=lambda case: case.name)


@every_case
@pytest.mark.parametrize("equality", [embeddings, bfloat16], ids=lambda each: each.__name__)
@pytest.mark.variants(6)
def test_tower_and_connector_match_transformers(
    vision: Vision, equality: Callable[[Vision], None]
) -> None:
    equality(vision)


@every_case
@pytest.mark.variants(4)
def test_missing_or_extra_tensor_is_named(vision: Vision, tmp_path: Path) -> None:
    targets = vision.case.weight_map(vision.module()).targets
    kinds = {re.sub(r"\d+", "", name): name for name in targets}
    for ending in kinds.values():
        name = ""

        def remove(tensors: dict[str, torch.Tensor], ending: str = ending) -> None:
            nonlocal name
            (name,) = (each for each in tensors if each.endswith(ending) and is_ours(each, ending))
            del tensors[name]

        with pytest.raises(ConfigError, match=re.escape(ending)):
            vision.edit(remove, tmp_path).module()
        assert name.endswith(ending)
    surplus = {"vision_tower.surplus.weight": torch.ones(1)}
    with pytest.raises(ConfigError, match=r"vision_tower\.surplus\.weight"):
        vision.edit(lambda tensors: tensors.update(surplus), tmp_path).module()


def is_ours(name: str, ending: str) -> bool:
    return not name.startswith(TEXT_PARTS) and name.removesuffix(ending) in (
        "",
        "model.",
        "visual.",
        "model.visual.",
    )


PLACED = [CASES[0], CASES[4], CASES[8], CASES[10]]


@pytest.mark.parametrize("vision", PLACED, indirect=True, ids=lambda case: case.name)
def test_embeddings_of_a_tile_are_in_its_order_row_by_row(vision: Vision) -> None:
    """Without attention an embedding depends on its own pixels only, so each tells its place."""
    module = vision.module()
    for name, parameter in module.named_parameters():
        if ".out." in name:
            parameter.data.zero_()
    sizes = vision.case.sizes
    size = next((each for each in sizes if each[1] != each[2]), sizes[0])
    pixels = picture(size)
    before = vision.encode(module, pixels, size)
    count = len(before) // size[0]
    columns = round((count * size[2] / size[1]) ** 0.5)
    rows = count // columns
    for row, column in ((0, columns - 1), (rows - 1, 0), (rows // 2, columns // 2)):
        y, x = int((row + 0.5) * size[1] / rows), int((column + 0.5) * size[2] / columns)
        changed = pixels.clone()
        changed[0, y, x] = 255 - changed[0, y, x]
        differs = (vision.encode(module, changed, size) != before).any(dim=1)
        assert differs.nonzero().flatten().tolist() == [row * columns + column]


def test_tiles_of_an_image_have_the_bits_that_each_has_alone(
    visions: Callable[[VisionCase], Vision],
) -> None:
    vision = visions(CASES[0])
    module = vision.module(torch.bfloat16, "numba", packs=True)
    pixels = picture((70, 24, 24))  # 36 patches a tile: more than are computed together
    together = vision.encode(module, pixels, ())
    alone = [vision.encode(module, tile[None], ()) for tile in pixels]
    assert torch.equal(together, torch.cat(alone))
