"""Quantised folders against the definitions of their forms in NumPy: equal bit by bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import WEIGHTS_INDEX, safetensors_header, weight_files
from engine.checkpoint.quantized.tensors import QuantizedTensor
from engine.checkpoint.tensors import checkpoint_tensors
from engine.offline.quantize.command import quantize_folder
from engine.offline.quantize.forms import FORMS
from engine.offline.quantize.write import RECORD
from engine.ops.quantize import int4_with_zeros, quantize
from tests.support.driver import tiny_llama
from tests.support.forward import forward, whole
from tests.support.golden import TOLERANCE, load, of_transformers
from tests.support.process import ROOT
from tests.support.quantized_files import (
    Matrix,
    Stored,
    Whole,
    fp8,
    numbers_of,
    runs,
    tensor,
    words,
)
from tests.support.tiny_bert import tiny_bert

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = torch.randint(288, (50,), generator=torch.Generator().manual_seed(1)).tolist()
GROUP = 32
WIDTHS = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
Tensors = dict[str, torch.Tensor]


def int4(weight: Matrix) -> tuple[Stored, Matrix]:
    """Whole zero points; a scale is a fifteenth of the range, rounded to 7 significant bits."""
    group_of = runs(weight.shape[1], GROUP)
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    fractions, exponents = np.frexp((high - low) / np.float32(15))
    scales = np.ldexp(np.round(fractions * 128) / 128, exponents)
    zeros = np.clip(np.round(-low / scales), 0, 15).astype(np.int64)
    steps = np.round(weight / scales[:, group_of]).astype(np.int64)
    codes = np.clip(steps + zeros[:, group_of], 0, 15)
    stored = {
        "weight_packed": tensor(words(codes, 4)),
        "weight_scale": tensor(scales, torch.float16),
        "weight_zero_point": tensor(words(zeros.T, 4).T),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, numbers_of(codes, scales, zeros, group_of)


def float8(weight: Matrix) -> tuple[Stored, Matrix]:
    codes, scales, numbers = fp8(weight, 1, weight.shape[1])
    return {"weight": codes, "weight_scale": tensor(scales)}, numbers


DEFINITIONS: dict[str, Callable[[Matrix], tuple[Stored, Matrix]]] = {
    "int8": Whole(8, "group", GROUP, packed=True).format.quantize,
    "int4": int4,
    "fp8": float8,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A reference model, and its checkpoint in several files."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    sizes = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=2)
    return of_transformers(config, folder, "100KB"), folder


def tensors_in(folder: Path) -> Tensors:
    return {name: each for file in weight_files(folder) for name, each in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_bits(found: torch.Tensor, due: torch.Tensor) -> bool:
    if found.dtype == torch.float8_e4m3fn:  # NumPy's definition rounds to 0, torch to -0 as well
        found, due = found.float() + 0, due.float() + 0
    raw = [each.contiguous().view(-1).view(torch.uint8) for each in (found, due)]
    return found.dtype == due.dtype and found.shape == due.shape and torch.equal(*raw)


@pytest.mark.parametrize("kind", FORMS)
def test_folder_holds_the_definition_and_serves_its_numbers(
    kind: str, llama: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.checkpoint.stored.CHUNK", 1000)  # a matrix has several pieces
    model, source = llama
    out = tmp_path / "out"
    quantize_folder(str(source), out, kind)
    due, numbers = {}, {}
    for name, plain in tensors_in(source).items():
        if not name.endswith("_proj.weight"):
            due[name] = plain
            continue
        stored, numbers[name] = DEFINITIONS[kind](plain.numpy())
        due |= {name.removesuffix("weight") + ending: part for ending, part in stored.items()}
    found = tensors_in(out)
    assert found.keys() == due.keys()
    assert [name for name in due if not same_bits(found[name], due[name])] == []
    read = checkpoint_tensors(out)
    with torch.inference_mode():
        for name, given in numbers.items():
            assert torch.equal(read[name].read(), torch.from_numpy(given)), name
            model.get_parameter(name).copy_(torch.from_numpy(given))
        logits = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(
        forward(load(out), [PROMPT], whole([PROMPT]))[0], logits, **TOLERANCE
    )


def test_int8_has_the_codes_and_scales_of_the_flag(llama: tuple[Any, Path], tmp_path: Path) -> None:
    quantize_folder(str(llama[1]), tmp_path / "out", "int8")
    read = checkpoint_tensors(tmp_path / "out")
    layers = {name: each for name, each in read.items() if isinstance(each, QuantizedTensor)}
    assert len(layers) == 14
    for name, plain in tensors_in(llama[1]).items():
        if name in layers:
            codes, due = layers[name].codes(), quantize(plain, "int8")
            assert torch.equal(codes.codes, due.codes)
            assert same_bits(codes.scales, due.scales)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_kept_codes_stand_for_the_same_numbers(
    kind: str, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    """The loader keeps fp16 scales and offsets. No rounding is needed for either."""
    quantize_folder(str(llama[1]), tmp_path / "out", kind)
    read = checkpoint_tensors(tmp_path / "out").values()
    layers = [each for each in read if isinstance(each, QuantizedTensor)]
    assert layers
    for layer in layers:
        assert torch.equal(layer.codes().dequantize(), layer.read())
        scales = layer.layer.parts["weight_scale"].read()
        assert kind == "int8" or torch.equal(scales.bfloat16().half(), scales)


@pytest.mark.parametrize(
    ("kind", "parts", "settings"),
    [
        (
            "int8",
            {"packed": ("I32", [64, 16]), "scale": ("F16", [64, 2]), "shape": ("I64", [2])},
            ("pack-quantized", 8, "int", "group", 32, True),
        ),
        (
            "int4",
            {"packed": ("I32", [64, 8]), "scale": ("F16", [64, 2]), "shape": ("I64", [2])}
            | {"zero_point": ("I32", [8, 2])},
            ("pack-quantized", 4, "int", "group", 32, False),
        ),
        (
            "fp8",
            {"": ("F8_E4M3", [64, 64]), "scale": ("F32", [64, 1])},
            ("float-quantized", 8, "float", "channel", None, True),
        ),
    ],
)
def test_names_dtypes_and_settings_are_those_of_the_format(
    kind: str,
    parts: dict[str, tuple[str, list[int]]],
    settings: tuple[Any, ...],
    llama: tuple[Any, Path],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    quantize_folder(str(llama[1]), out, kind)
    declared = {}
    for file in weight_files(out):
        header = safetensors_header(file)
        declared |= header
        for name, entry in header.items():  # torch takes no tensor that is not aligned
            assert entry["data_offsets"][0] % WIDTHS[entry["dtype"]] == 0, name
    base = "model.layers.1.self_attn.q_proj.weight"
    found = {
        name: (entry["dtype"], entry["shape"])
        for name, entry in declared.items()
        if name.startswith(base)
    }
    assert found == {f"{base}_{ending}".rstrip("_"): part for ending, part in parts.items()}
    config = config_of(out)
    written = config.pop("quantization_config")
    assert config == config_of(llama[1])
    assert written["quant_method"] == "compressed-tensors"
    assert written["quantization_status"] == "compressed"
    assert written["ignore"] == ["lm_head"]
    [group] = written["config_groups"].values()
    weights = group["weights"]
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric")
    assert (written["format"], *(weights[key] for key in keys)) == settings
    assert (group["targets"], group["input_activations"]) == (["Linear"], None)


def test_files_and_index_are_divided_as_in_the_source(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantize_folder(str(llama[1]), out, "int4")
    names = [file.name for file in weight_files(out)]
    assert names == [file.name for file in weight_files(llama[1])]
    assert len(names) > 1
    index = json.loads((out / WEIGHTS_INDEX).read_text())
    where = {name: file for file in names for name in safetensors_header(out / file)}
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_in(out).values())
    record = json.loads((out / RECORD).read_text())
    assert record["quantization"] == "int4"
    assert record["inputs"][0]["folder"] == str(llama[1])


@pytest.mark.parametrize("outputs", [8, 13])
@pytest.mark.parametrize("kind", FORMS)
def test_stored_shapes_are_those_declared(kind: str, outputs: int) -> None:
    """13 outputs do not fill a word of zero points."""
    form, rows = FORMS[kind], torch.randn(outputs, 64)
    due = {
        ending: part.shape
        for ending, part in form.declared(outputs, 64).items()
        if ending != "weight_shape"
    }
    assert {ending: tuple(part.shape) for ending, part in form.rounded(rows).items()} == due


def test_int4_of_groups_of_one_sign_has_an_exact_zero() -> None:
    """All positive, all negative, all zero, and so small that fp16 has no scale."""
    signs = torch.tensor([1.0, -1.0, 0.0, 1e-12])[:, None]
    weight = signs * torch.linspace(0.5, 1, GROUP)
    weight[:, 7] = 0
    found = int4_with_zeros(weight)
    assert found.zeros.flatten().tolist() == [0, 15, 0, 0]
    assert torch.equal(found.codes[:, 7:8], found.zeros)
    assert found.codes[:, -1].tolist() == [15, 0, 0, 0]
    assert found.scales[2:].flatten().tolist() == [0, 0]


def test_layers_that_do_not_fill_groups_stay_plain(tmp_path: Path) -> None:
    """In an encoder with 48 inputs of one layer. It has no head to ignore."""
    source = tiny_bert(tmp_path / "bert")
    weights = load_file(source / "model.safetensors")
    weights |= {"pooler.dense.weight": torch.ones(32, 32), "pooler.dense.bias": torch.ones(32)}
    save_file(weights, source / "model.safetensors")
    layers = quantize_folder(str(source), tmp_path / "out", "int8")
    down = [f"encoder.layer.{i}.output.dense" for i in range(2)]
    assert sorted(layers.ignored) == [*down, "pooler.dense"]
    assert config_of(tmp_path / "out")["quantization_config"]["ignore"] == layers.ignored
    assert len(layers.rounded) == 2 * 5
    found = tensors_in(tmp_path / "out")
    assert all(torch.equal(found[f"{name}.weight"], weights[f"{name}.weight"]) for name in down)
    load(tmp_path / "out")


def test_head_of_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    """Other programs have a layer for it. The demo of an encoder–decoder has one too."""
    for model in ("demo", "demo-translate"):
        layers = quantize_folder(model, tmp_path / model, "int4")
        assert layers.ignored == ["lm_head"]
        load(tmp_path / model)


def test_parts_that_are_not_served_are_ignored_by_pattern(tmp_path: Path) -> None:
    """A vision tower has linear layers too, under names that programs spell in several ways."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "gemma")
    layers = quantize_folder(str(tmp_path / "gemma"), tmp_path / "out", "int8")
    names = tensors_in(tmp_path / "gemma")
    plain = [n for n in names if n.endswith(".weight") and n not in layers.rounded]
    patterns = [p.removeprefix("re:") for p in layers.ignored if p.startswith("re:")]
    towers = [n for n in plain if any(re.match(p, n) for p in patterns)]
    assert any("vision_tower" in name for name in towers)
    assert not any("language_model" in name for name in towers)
    load(tmp_path / "out")


# Not getrusage: a process inherits the peak of its parent.
MEASURE = """
import re, sys
from pathlib import Path
import torch
from engine.offline.quantize.command import quantize_folder
torch.set_num_threads(1)
quantize_folder("demo", Path(sys.argv[2]) / "small", sys.argv[3])  # imports and warms up
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = status("VmRSS")
quantize_folder(sys.argv[1], Path(sys.argv[2]) / "out", sys.argv[3])
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", FORMS)
def test_memory_does_not_grow_with_a_tensor(kind: str, tmp_path: Path) -> None:
    """The largest tensor has 128 MB, the model 500 MB."""
    sizes = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 1}
    source = tiny_llama(tmp_path / "model", **sizes)
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path), kind]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) < 100e6
