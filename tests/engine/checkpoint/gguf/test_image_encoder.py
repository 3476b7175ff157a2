"""GGUF models with an image encoder against the checkpoints that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import model_folder, notes_of, weight_files
from engine.checkpoint.image_config import read_image_config
from engine.errors import ConfigError
from engine.models.base import SeesWhole, image_encoder
from engine.runner.model_runner import ModelRunner
from server.images.processors.registry import processor_of
from tests.support.forward import forward
from tests.support.forward import whole as at_once
from tests.support.gguf_sidecars import (
    kind_of,
    sidecar_settings,
    sidecar_tensors,
    write_file,
    write_pair,
    write_sidecar,
    write_text,
)
from tests.support.golden import load, of_transformers
from tests.support.seeing import Shown, prompt_with
from tests.support.tiny_gguf import write_tiny
from tests.support.vision import MEAN, STD, picture, shows, whole

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
IMAGE_TOKEN = 210
TEXT = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
MROPE = {"rope_type": "default", "rope_theta": 1000.0}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}
HEADLESS = {"vision_use_head": False}
QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 6}
QWEN |= {"out_hidden_size": 64}
COLOURS = {"image_mean": list(MEAN), "image_std": list(STD)}


def idefics3() -> Any:
    from transformers import Idefics3Config

    text = TEXT | {"model_type": "llama", "rms_norm_eps": 1e-5}
    return Idefics3Config(text_config=text, vision_config=SIGLIP, scale_factor=2)


def gemma3() -> Any:
    from transformers import Gemma3Config

    rope = {"full_attention": GLOBAL, "sliding_attention": LOCAL}
    own = {"sliding_window": 20, "query_pre_attn_scalar": 16, "sliding_window_pattern": 3}
    text = TEXT | own | {"rope_parameters": rope}
    return Gemma3Config(text_config=text, vision_config=SIGLIP | HEADLESS, mm_tokens_per_image=9)


def qwen25() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = TEXT | {"rope_parameters": MROPE | {"mrope_section": [3, 1, 4]}}
    vision = QWEN | {"window_size": 112, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


def qwen3() -> Any:
    from transformers import Qwen3VLConfig

    text = TEXT | {"rope_parameters": MROPE | {"mrope_section": [4, 2, 2]}}
    vision = QWEN | {"num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)


class Family(NamedTuple):
    config: Callable[[], Any]
    picture: Shown
    processor: dict[str, Any]  # the files of the released checkpoints


def tiles(count: int) -> Shown:
    return Shown(picture((count, 24, 24)), count * 9)


def area(smallest: int, largest: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": smallest, "longest_edge": largest}}


# The window of Qwen2.5 is 9 embeddings a side: this picture has one whole window and three others.
WIDE = Shown(picture((1, 12 * 11, 12 * 10)), 110, (11, 10))
FAMILIES = {
    "idefics3": Family(
        idefics3,
        tiles(3),
        {"size": {"longest_edge": 72}, "max_image_size": {"longest_edge": 24}},
    ),
    "gemma3": Family(gemma3, tiles(1), {"size": {"height": 24, "width": 24}}),
    "qwen25": Family(qwen25, WIDE, {"patch_size": 6} | area(3136, 12845056)),
    "qwen3": Family(qwen3, WIDE, {"patch_size": 6} | area(65536, 16777216)),
}
NESTED = {"idefics3": {"image_seq_len": 9}, "gemma3": {"image_seq_length": 9}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's checkpoint."""

    @cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        of_transformers(FAMILIES[name].config(), folder)
        processor = {"image_processor": FAMILIES[name].processor | COLOURS} | NESTED.get(name, {})
        (folder / "processor_config.json").write_text(json.dumps(processor))
        return folder

    return write


def encoded(runner: ModelRunner, image: Shown) -> torch.Tensor:
    encoder = image_encoder(runner.model)
    assert encoder is not None
    return whole(encoder.encode(image.pixels, image.image(3)))


def logits(runner: ModelRunner, image: Shown) -> torch.Tensor:
    """Return the logits of a prompt with an image."""
    prompt, [first] = prompt_with([image], IMAGE_TOKEN)
    backend = runner.backend if isinstance(runner.model, SeesWhole) else None
    prepare = shows([[(first, encoded(runner, image))]], backend)
    images = [(image.image(first),)]
    return forward(runner, [prompt], at_once([prompt]), prepare=prepare, images=images)[0]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.variants(2)
def test_logits_and_processor_are_those_of_the_checkpoint(
    name: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, family = checkpoints(name), FAMILIES[name]
    file = write_pair(tmp_path / "pair", folder)
    assert torch.equal(logits(load(file), family.picture), logits(load(folder), family.picture))
    processors = []
    for each in (model_folder(str(file)), folder):
        config, image_config = read_json(each / "config.json"), read_image_config(each)
        assert image_config is not None
        processors.append(processor_of(config, image_config, config["architectures"][0]))
    assert processors[0] == processors[1]
    assert weight_files(model_folder(str(file.parent)))[1].name == "mmproj-model-F32.gguf"


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float32"), ("Q8_0", "bfloat16")])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.variants(2)
def test_stored_types_of_an_encoder_are_read_as_their_numbers(
    name: str, kind: str, dtype: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """A file of this type equals one of F32 with the numbers that the type can hold.

    In bfloat16 a language model would keep the codes of Q8_0.
    """
    folder, quants = checkpoints(name), gguf.quants
    text = write_text(tmp_path / "model.gguf", folder)
    rounded = {}
    for stored, tensor in sidecar_tensors(folder).items():
        number = gguf.GGMLQuantizationType[kind_of(stored, tensor, kind)]
        rounded[stored] = quants.dequantize(quants.quantize(tensor, number), number)
    sidecar = tmp_path / "mmproj-model.gguf"
    write_file(sidecar, sidecar_settings(folder), rounded, "F32")
    due = encoded(load(text, dtype=dtype), FAMILIES[name].picture)
    write_sidecar(sidecar, folder, kind)
    assert torch.equal(encoded(load(text, dtype=dtype), FAMILIES[name].picture), due)
    sidecar.unlink()
    write_sidecar(sidecar, folder)
    assert not torch.equal(encoded(load(text, dtype=dtype), FAMILIES[name].picture), due)


@pytest.mark.parametrize("name", ["qwen25", "qwen3"])
def test_qwen_without_an_encoder_reads_text(
    name: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, prompt = checkpoints(name), [*range(40)]
    runner = load(write_text(tmp_path / "model.gguf", folder))
    assert image_encoder(runner.model) is None
    found, due = (forward(each, [prompt], at_once([prompt]))[0] for each in (runner, load(folder)))
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)


def exchanged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with the names that old converters gave to the layers of an MLP."""
    names = {".ffn_up.": ".ffn_down.", ".ffn_down.": ".ffn_up."}
    found = {}
    for name, tensor in tensors.items():
        part = next((part for part in names if part in name), None)
        found[name if part is None else name.replace(part, names[part])] = tensor
    return found


@pytest.mark.parametrize("name", ["gemma3", "qwen25"])
def test_exchanged_names_of_old_files_are_found_by_their_shapes(
    name: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, file = checkpoints(name), tmp_path / "pair" / "mmproj-model-F32.gguf"
    model = write_pair(tmp_path / "pair", folder)
    due = encoded(load(model), FAMILIES[name].picture)
    settings = sidecar_settings(folder) | {"clip.vision.feed_forward_length": 0}
    write_file(file, settings, exchanged(sidecar_tensors(folder)), "F32")
    assert torch.equal(encoded(load(model), FAMILIES[name].picture), due)


# ---- which sidecar ---------------------------------------------------------------------------


def test_encoder_is_chosen_by_its_projector_its_width_and_its_type(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    text = write_text(tmp_path / "model.gguf", checkpoints("idefics3"))
    for name in ("mtp-model.gguf", "imatrix.gguf"):
        (tmp_path / name).touch()
    assert "encodes images" not in str(notes_of(model_folder(str(text))))
    write_sidecar(tmp_path / "mmproj-a-f32.gguf", checkpoints("idefics3"))
    write_sidecar(tmp_path / "mmproj-b-f16.gguf", checkpoints("idefics3"), "F16")
    write_sidecar(tmp_path / "mmproj-c-bf16.gguf", checkpoints("qwen3"))
    assert notes_of(model_folder(str(text)))[-1] == "mmproj-b-f16.gguf encodes images (idefics3)"
    assert model_folder(str(tmp_path)) == model_folder(str(text))
    for name in ("mmproj-a-f32.gguf", "mmproj-b-f16.gguf"):
        (tmp_path / name).unlink()
    folder = model_folder(str(text))
    assert read_json(folder / "config.json")["architectures"] == ["LlamaForCausalLM"]
    assert notes_of(folder)[-1] == (
        "mmproj-c-bf16.gguf has the projector qwen3vl_merger, so it is for qwen3vl models and not "
        "used"
    )


def test_model_of_a_family_without_images_leaves_an_encoder_alone(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_tiny(tmp_path / "model.gguf", "qwen2")
    (tmp_path / "mmproj-x.gguf").write_bytes(b"damaged")
    note = "mmproj-x.gguf is not used: qwen2 files are served without images"
    assert notes_of(model_folder(str(file)))[-1] == note


VISION = "clip.vision."
REFUSED = {
    "projector": (
        "idefics3",
        {"clip.projector_type": "pixtral"},
        r"mmproj-x.gguf has the projector pixtral, which is not served; served are idefics3, gemma3"
        r".*To serve the text alone, move the file",
    ),
    "no projector": ("idefics3", {"clip.projector_type": None}, "has the projector unknown"),
    "key": ("idefics3", {f"{VISION}feature_layer": [1]}, "idefics3. .*sets clip.vision.feature_l"),
    "tiles": ("gemma3", {f"{VISION}preproc_image_size": 72}, "sets clip.vision.preproc_image_size"),
    "missing": ("gemma3", {f"{VISION}image_mean": None}, "lacks clip.vision.image_mean"),
    "audio": ("qwen3", {"clip.has_audio_encoder": True}, "sets clip.has_audio_encoder to True"),
    "activation": ("qwen25", {"clip.use_silu": False}, "sets clip.use_silu to False"),
    "no activation": ("qwen25", {"clip.use_silu": None}, "lacks clip.use_silu"),
    "number": ("qwen25", {f"{VISION}n_wa_pattern": 0}, "n_wa_pattern = 0"),
    "epsilon": ("gemma3", {f"{VISION}attention.layer_norm_epsilon": 2.0}, "epsilon = 2.0"),
    "deepstack": (
        "qwen3",
        {f"{VISION}is_deepstack_layers": [True, False, False]},
        "qwen3vl_merger and 1 deepstack layers, where the model has 2",
    ),
    "list": ("qwen3", {f"{VISION}is_deepstack_layers": [1, 0, 1]}, "must be a list of true and"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.variants(4)
def test_encoder_that_is_not_served_is_refused_with_its_name(
    case: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    name, changed, said = REFUSED[case]
    file = write_text(tmp_path / "model.gguf", checkpoints(name))
    write_sidecar(tmp_path / "mmproj-x.gguf", checkpoints(name), changed=changed)
    with pytest.raises(ConfigError, match=said):
        model_folder(str(file))


def test_encoder_of_another_width_is_refused_with_both_numbers(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoints("idefics3")
    file = write_text(tmp_path / "model.gguf", folder)
    tensors = sidecar_tensors(folder)
    tensors["mm.model.fc.weight"] = tensors["mm.model.fc.weight"][:48]
    write_file(tmp_path / "mmproj-x.gguf", sidecar_settings(folder), tensors, "F32")
    with pytest.raises(ConfigError, match=r"idefics3 and embeddings of 48 numbers, .* has 64"):
        model_folder(str(file))


@pytest.mark.parametrize(
    ("name", "dropped", "added", "said"),
    [
        ("idefics3", "mm.model.fc.weight", None, "lacks the tensor mm.model.fc.weight"),
        ("gemma3", "v.blk.1.ln1.bias", None, "lack .*layers.1.layer_norm1.bias"),
        ("qwen25", "v.blk.1.attn_v.bias", None, "lacks the tensor v.blk.1.attn_v.bias"),
        ("qwen25", "v.patch_embd.weight.1", None, "lacks the tensor v.patch_embd.weight.1"),
        ("qwen3", None, "v.pre_ln.weight", "holds the tensor 'v.pre_ln.weight'.*qwen3vl_merger"),
    ],
)
def test_tensors_that_are_missing_or_too_many_are_named(
    name: str,
    dropped: str | None,
    added: str | None,
    said: str,
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = checkpoints(name)
    file = write_text(tmp_path / "model.gguf", folder)
    tensors = sidecar_tensors(folder)
    if dropped:
        del tensors[dropped]
    if added:
        tensors[added] = np.ones(32, np.float32)
    write_file(tmp_path / "mmproj-x.gguf", sidecar_settings(folder), tensors, "F32")
    with pytest.raises(ConfigError, match=said):
        load(file)


def test_encoder_alone_is_no_model(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    write_sidecar(tmp_path / "mmproj-x.gguf", checkpoints("gemma3"))
    with pytest.raises(ConfigError, match=r"an image encoder .* and no model"):
        model_folder(str(tmp_path))


@pytest.mark.parametrize(("name", "due"), [("idefics3", 1e-5), ("qwen3", None)])
def test_epsilon_is_that_of_the_file_and_fixed_for_qwen(
    name: str, due: float | None, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_text(tmp_path / "model.gguf", checkpoints(name))
    changed = {f"{VISION}attention.layer_norm_epsilon": 1e-5}
    write_sidecar(tmp_path / "mmproj-x.gguf", checkpoints(name), changed=changed)
    folder = model_folder(str(file))
    vision, notes = read_json(folder / "config.json")["vision_config"], notes_of(folder)
    assert vision.get("layer_norm_eps") == (due and float(np.float32(due)))
    assert ("epsilon 1e-05 of the image encoder" in notes[-1]) == (due is None)
