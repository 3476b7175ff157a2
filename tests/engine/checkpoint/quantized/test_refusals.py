"""Quantised checkpoints that are damaged, or of a kind that is not served, are refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.quantized.formats import STORAGE_FORMATS, storage_format
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.runner.load import load_engine
from tests.support.driver import tiny_llama
from tests.support.golden import Tensors, edit_checkpoint
from tests.support.quantized_base import compressed
from tests.support.quantized_files import FORMATS, write_quantized

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = "model.safetensors"
LAYER = "model.layers.0.mlp.up_proj"
SIZES = {"num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96}
AWQ, GPTQ = FORMATS["awq"].settings, FORMATS["gptq 4"].settings
PACK, FP8 = FORMATS["pack 4"].settings, FORMATS["fp8 blocks"].settings
NF4, NVFP4 = FORMATS["nf4"].settings, FORMATS["modelopt nvfp4"].settings
TORCHAO = FORMATS["torchao int4"].settings


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("source") / "model", **SIZES)


def refusal(folder: Path) -> str:
    fields = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 2}
    config = EngineConfig(model=str(folder), **fields, num_gpu_blocks_override=8)
    with pytest.raises(ConfigError) as caught:
        load_engine(config)
    return str(caught.value)


# ---- config.json -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    "given",
    [
        *({"quant_method": name, "bits": 4} for name in ("hqq", "quanto", "quark")),
        *({"quant_method": name} for name in ("mxfp8", "higgs", "vptq", "auto-round")),
        {"load_in_4bit": True},
        {"quant_method": ["gptq"]},
        {"quant_method": {}},
        "gptq",
        [1],
    ],
    ids=str,
)
def test_unknown_method_is_refused_with_the_list_of_those_served(key: str, given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        storage_format({key: given})
    said = str(caught.value)
    assert said.startswith(f"config.json has {key} (")
    name = given.get("quant_method") if isinstance(given, dict) else given
    assert repr(name)[:99] in said
    assert all(method in said for method in STORAGE_FORMATS)


@pytest.mark.parametrize("nothing", [None, {}, ""])
def test_no_settings_are_plain_weights(nothing: Any) -> None:
    assert storage_format({"quantization_config": nothing}) is None


def group(**weights: Any) -> dict[str, Any]:
    given = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | weights
    return compressed("int-quantized", **given)


def micro(form: str, **weights: Any) -> dict[str, Any]:
    return compressed(form, **{"num_bits": 4, "type": "float", "group_size": 32} | weights)


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (AWQ | {"bits": 8}, "bits = 8 for weights quantised with awq; supported: 4"),
        (AWQ | {"bits": True}, "bits = True"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"version": None, "format": "llm-awq"}, "version = 'llm-awq'"),
        (AWQ | {"zero_point": False}, "zero_point = False"),
        (AWQ | {"group_size": 0}, "group_size = 0"),
        (AWQ | {"group_size": "32"}, "group_size = '32'"),
        (GPTQ | {"bits": 2}, "bits = 2 for weights quantised with gptq; supported: 4, 8"),
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"bits": None}, "bits = None"),
        (GPTQ | {"group_size": -2}, "group_size = -2"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format = True"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype = 'int8'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic = '+:.*down.*'"),
        (GPTQ | {"dynamic": 5}, "dynamic = 5"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size = [128]"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size = [0, 128]"),
        (FP8 | {"weight_block_size": 128}, "weight_block_size = 128"),
        (PACK | {"format": "mxfp6-pack-quantized"}, "format = 'mxfp6-pack-quantized'"),
        (PACK | {"format": "nvfp4-pack-quantized"}, "type = 'int' for weights quantised with"),
        (micro("mxfp4-pack-quantized", num_bits=8), "num_bits = 8 for weights quantised with"),
        (
            micro("mxfp4-pack-quantized", group_size=16),
            "group_size = 16 for weights quantised with",
        ),
        (micro("mxfp8-quantized", num_bits=8, strategy="channel"), "strategy = 'channel'"),
        (micro("nvfp4-pack-quantized", group_size=16, strategy="group"), "supported: tensor_group"),
        (micro("mxfp4-pack-quantized", symmetric=False), "symmetric = False"),
        (NF4 | {"load_in_8bit": True}, "load_in_8bit = True for weights quantised with bitsand"),
        (NF4 | {"load_in_4bit": False}, "load_in_4bit = False"),
        (NVFP4 | {"quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ' for weights quantised"),
        (NVFP4 | {"quant_algo": "W4A16_AWQ"}, "supported: FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        (NVFP4 | {"quant_algo": None}, "quant_algo = None"),
        (NVFP4 | {"group_size": 8}, "group_size = 8 for weights quantised with modelopt, NVFP4"),
        (NVFP4 | {"quant_algo": "MIXED_PRECISION"}, "quantized_layers = None"),
        (
            NVFP4 | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
            "quant_algo = None",
        ),
        (NVFP4 | {"quantization": [1]}, "quantization = [1]"),
        (torchao("PlainLayout"), "quant_type = 'PlainLayout' for weights quantised with torchao"),
        (torchao("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"), "supported: PL"),
        (
            torchao("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE_TORCHAO_AUTO"}),
            "intx_packing_format = 'OPAQUE_TORCHAO_AUTO'",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "'int4_weight_only'"),
        (
            torchao(
                "FqnToConfig",
                fqn_to_config={
                    "a": {"_type": "Int4WeightOnlyConfig", "_data": {}},
                    "b": {"_type": "Int8WeightOnlyConfig", "_data": {}},
                },
            ),
            "two int4 in a byte for all layers, or for none",
        ),
        (PACK | {"format": "marlin-24"}, "format = 'marlin-24'"),
        (PACK | {"format": None}, "format = None"),
        (PACK | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (PACK | {"transform_config": {"config_groups": {}}}, "transform_config = {"),
        (PACK | {"config_groups": {}}, "config_groups = {}"),
        (PACK | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 = ['Linear']"),
        (PACK | {"config_groups": {"a": {"weights": 4}}}, "config_groups.a = {'weights': 4}"),
        (group(num_bits=3), "num_bits = 3"),
        (
            compressed("pack-quantized", num_bits=3, type="int", strategy="channel"),
            "num_bits = 3 for weights quantised with compressed-tensors in the format "
            "pack-quantized, which has two layouts of 3 bits under one name; supported: 4, 8",
        ),
        (compressed("pack-quantized", num_bits=6, type="int"), "two layouts of 6 bits"),
        (compressed("pack-quantized", num_bits=2, type="int"), "num_bits = 2 for weights"),
        (group(type="float", num_bits=4), "num_bits = 4"),
        (group(type="complex"), "type = 'complex'"),
        (group(strategy="token"), "strategy = 'token'"),
        (group(strategy="group"), "group_size = None"),
        (group(strategy="block"), "block_structure = None"),
        (group(symmetric=None), "symmetric = None"),
        (compressed("pack-quantized", num_bits=8, type="float"), "type = 'float'"),
    ],
)
def test_variant_that_is_not_served_is_refused_by_name(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        storage_format({"quantization_config": settings})
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json has ")


def test_plan_refuses_before_weights_are_read(source: Path, tmp_path: Path) -> None:
    write_quantized(source, tmp_path / "model", FORMATS["awq"], version="gemv")
    (tmp_path / "model" / FILE).unlink()
    with pytest.raises(ConfigError, match="version = 'gemv'"):
        ModelPlan(EngineConfig(model=str(tmp_path / "model"), device="cpu"))


# ---- tensors ---------------------------------------------------------------------------------


def without(ending: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(f"{LAYER}.{ending}")


def changed(
    ending: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], Any]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{ending}"] = change(tensors[f"{LAYER}.{ending}"]).contiguous()

    return edit


def added(ending: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"{LAYER}.{ending}": value})


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def state(**changes: Any) -> torch.Tensor:
    given = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [96, 64]}
    return torch.tensor(list(json.dumps(given | changes).encode()), dtype=torch.uint8)


DAMAGE: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "awq without scales": ("awq", without("scales"), f"{LAYER}.scales is missing: "),
    "awq without zeros": ("awq", without("qzeros"), f"{LAYER}.qzeros is missing: "),
    "awq without codes": ("awq", without("qweight"), f"{LAYER}.qweight is missing: "),
    "awq int64": ("awq", changed("qweight", torch.Tensor.long), "has dtype I64; its method stores"),
    "awq inputs": ("awq", changed("qweight", cut), "has 63 inputs, which do not fill groups of 32"),
    "awq scales": ("awq", changed("scales", cut), f"{LAYER}.scales in "),
    "awq int scales": ("awq", changed("scales", torch.Tensor.int), "has dtype I32"),
    "awq rank": ("awq", changed("qweight", torch.Tensor.flatten), "2 dimensions above 0"),
    "awq empty": ("awq", changed("qweight", lambda t: t[:0]), "has shape [0, 12]"),
    "awq columns": ("awq", changed("qzeros", lambda t: t[:, 1:]), "ask for [2, 12]"),
    "awq and plain": ("awq", added("weight", torch.ones(96, 64)), "twice: plain and quantised"),
    "awq scale nan": ("awq", changed("scales", lambda t: t * torch.nan), "holds NaN or infinity"),
    "gptq without scales": ("gptq 4", without("scales"), f"{LAYER}.scales is missing: "),
    "gptq order": ("gptq act order", without("g_idx"), f"{LAYER}.g_idx is missing: "),
    "gptq codes": (
        "gptq 4",
        changed("qweight", cut),
        "has shape [64]; the layer and config.json ask for [56]",
    ),
    "gptq outputs": (
        "gptq 4",
        changed("qweight", lambda t: t[:, 1:]),
        "has 95 outputs, which do not fill groups of 8",
    ),
    "gptq groups": ("gptq 4", changed("g_idx", lambda t: t + 1), "names groups from 1 to 2"),
    "gptq negative": ("gptq 4", changed("g_idx", lambda t: t - 1), "names groups from -1 to 0"),
    "gptq g_idx": ("gptq 4", changed("g_idx", cut), "has shape [63]; the layer and"),
    "gptq surplus": ("gptq 4", added("perm", torch.ones(4)), f"holds {LAYER}.perm, which this"),
    "pack without scale": ("pack 4", without("weight_scale"), "weight_scale is missing: "),
    "pack without shape": ("pack 4", without("weight_shape"), "weight_shape is missing: "),
    "pack without zeros": ("pack 4 zeros", without("weight_zero_point"), "zero_point is missing: "),
    "pack shape": ("pack 4", changed("weight_shape", lambda t: t + 1), "is [97, 65], and "),
    "pack inputs": (
        "pack 4",
        changed("weight_shape", lambda t: t + torch.tensor([0, 64])),
        "has shape [96, 8]; the layer and config.json ask for [96, 16]",
    ),
    "pack negative": ("pack 4", changed("weight_shape", lambda t: t - t), "is [0, 0], and "),
    "pack scale": ("pack 4", changed("weight_scale", lambda t: t[:, 1:]), "ask for [96, 2]"),
    "pack zeros": (
        "pack 4 zeros",
        changed("weight_zero_point", cut),
        "has shape [11, 2]; the layer and config.json ask for [12, 2]",
    ),
    "pack and plain": ("pack 4", added("weight", torch.ones(96, 64)), "exclude each other"),
    "int8 and shape": ("int8 channel", added("weight_shape", torch.ones(2)), "exclude each other"),
    "fp8 two scales": ("fp8 blocks", added("weight_scale", torch.ones(1)), "exclude each other"),
    "pack groups differ": (
        "pack 4 act order",
        changed("weight_g_idx", lambda t: (torch.arange(64) > 40).int()),
        "has groups of different sizes",
    ),
    "pack group": (
        "pack 4 act order",
        changed("weight_g_idx", lambda t: t + 7),
        "names groups from 7 to 8",
    ),
    "channel groups": (
        "pack 8",
        added("weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        "config.json has the strategy channel",
    ),
    "int8 as int16": ("int8 channel", changed("weight", torch.Tensor.short), "has dtype I16"),
    "int8 as fp8": (
        "int8 channel",
        changed("weight", lambda t: t.to(torch.float8_e4m3fn)),
        "has dtype F8_E4M3, as no group",
    ),
    "int8 without scale": ("int8 channel", without("weight_scale"), "weight_scale is missing: "),
    "int8 scale": ("int8 group", changed("weight_scale", cut), "has shape [95, 2]; the layer"),
    "float zeros": (
        "float block",
        added("weight_zero_point", torch.zeros(2, 2, dtype=torch.int8)),
        "blocks with zero points are not served",
    ),
    "fp8 without scale": ("fp8 blocks", without("weight_scale_inv"), "scale_inv is missing: "),
    "fp8 blocks": ("fp8 blocks", changed("weight_scale_inv", cut), "ask for [2, 2]"),
    "fp8 e5m2": (
        "fp8 blocks",
        changed("weight", lambda t: t.float().to(torch.float8_e5m2)),
        "has dtype F8_E5M2; its method stores F8_E4M3",
    ),
    "fp8 nan": (
        "fp8 blocks",
        changed("weight", lambda t: (t.float() * torch.nan).to(torch.float8_e4m3fn)),
        "holds NaN or infinity",
    ),
    "fp8 scales": ("fp8 tensor", changed("weight_scale", lambda t: torch.ones(2)), "ask for [] or"),
    "nvfp4 without divisor": (
        "nvfp4",
        without("weight_global_scale"),
        f"{LAYER}.weight_global_scale is missing: ",
    ),
    "nvfp4 shape": ("nvfp4", added("weight_shape", torch.ones(2)), "no meaning in codes in bytes"),
    "nvfp4 zeros": (
        "nvfp4",
        added("weight_zero_point", torch.zeros(96, 4)),
        "no meaning in the format nvfp4-pack-quantized",
    ),
    "mxfp4 divisor": ("mxfp4", added("weight_global_scale", torch.ones(1)), "has no meaning in"),
    "mxfp8 scale 255": (
        "mxfp8",
        changed("weight_scale", lambda t: t.fill_(255)),
        "holds NaN or infinity",
    ),
    "modelopt scale": ("modelopt nvfp4", changed("weight_scale", cut), "ask for [96, 4]"),
    "modelopt without second": (
        "modelopt nvfp4",
        without("weight_scale_2"),
        f"{LAYER}.weight_scale_2 is missing: ",
    ),
    "modelopt second": (
        "modelopt fp8",
        added("weight_scale_2", torch.ones(1)),
        "no meaning in weights with scales of dtype F32",
    ),
    "modelopt smooth": (
        "modelopt nvfp4",
        added("pre_quant_scale", torch.ones(64)),
        f"holds {LAYER}.pre_quant_scale, which this",
    ),
    "modelopt dtype": (
        "modelopt nvfp4",
        changed("weight", lambda t: t.view(torch.int8)),
        "has dtype I8; its method stores U8",
    ),
    "nf4 without state": (
        "nf4",
        without("weight.quant_state.bitsandbytes__nf4"),
        f"{LAYER}.weight.quant_state.bitsandbytes__nf4 is missing: ",
    ),
    "nf4 codes": ("nf4", changed("weight", cut), "has 3071 bytes; its quant_state asks for [96, "),
    "nf4 absmax": ("nf4", changed("weight.absmax", cut), "has shape [95]"),
    "nf4 map": ("nf4", changed("weight.quant_map", torch.Tensor.neg), "the numbers of nf4"),
    "nf4 state": (
        "nf4",
        changed("weight.quant_state.bitsandbytes__nf4", cut),
        f"{LAYER}.weight.quant_state.bitsandbytes__nf4 in ",
    ),
    "nf4 shape": (
        "nf4",
        added("weight.quant_state.bitsandbytes__nf4", state(shape=[96, "64"])),
        "shape has '64'; it must be from 1",
    ),
    "nf4 as fp4": (
        "nf4",
        added("weight.quant_state.bitsandbytes__nf4", state(quant_type="fp4")),
        "it is no object with quant_type nf4",
    ),
    "nf4 nested scales": (
        "nf4 nested",
        without("weight.nested_absmax"),
        "nested_absmax is missing",
    ),
    "nf4 nested by another": (
        "nf4",
        added("weight.nested_absmax", torch.ones(1)),
        "no meaning in a quant_state without nested_blocksize",
    ),
    "torchao groups": (
        "torchao int4",
        changed("_weight_scale", lambda t: t[:, 1:]),
        "ask for [2, 96]",
    ),
    "torchao uneven": (
        "torchao intx",
        changed("_weight_scale", lambda t: t[:, :1].repeat(1, 3)),
        "has 64 inputs, not 3 equal groups of them",
    ),
    "torchao activations": (
        "torchao int4",
        added("_weight_act_pre_scale", torch.ones(64)),
        f"holds {LAYER}._weight_act_pre_scale, which this",
    ),
    "kv scale": ("fp8 tensor", added("k_scale", torch.ones(1)), f"holds {LAYER}.k_scale, which"),
}


@pytest.mark.variants(20)
@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_layer_is_refused_by_name(case: str, source: Path, tmp_path: Path) -> None:
    name, damage, words = DAMAGE[case]
    folder = tmp_path / "model"
    write_quantized(source, folder, FORMATS[name])
    edit_checkpoint(folder, lambda config, tensors: damage(tensors))
    said = refusal(folder)
    assert words in said
    assert LAYER in said
    assert FILE in said
    assert "\n" not in said


def test_missing_layer_is_named_as_the_model_has_it(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_quantized(source, folder, FORMATS["awq"])

    def remove(config: dict[str, Any], tensors: Tensors) -> None:
        for ending in ("qweight", "qzeros", "scales"):
            del tensors[f"{LAYER}.{ending}"]

    edit_checkpoint(folder, remove)
    assert refusal(folder) == f"The weights in {folder} lack {LAYER}.weight."


def test_layer_of_another_shape_than_the_model_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_quantized(source, folder, FORMATS["awq"])
    edit_checkpoint(folder, lambda config, tensors: config.update(intermediate_size=104))
    assert "has shape [64, 96]; config.json asks for [64, 104]" in refusal(folder)


def test_quantized_conv1d_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    from tests.support.golden import of_transformers

    config = GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    of_transformers(config, tmp_path / "model")
    codes, _ = FORMATS["awq"].quantize(torch.randn(32, 32).numpy())

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        name = "transformer.h.0.attn.c_proj"
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{ending}": part.contiguous() for ending, part in codes.items()}
        config["quantization_config"] = AWQ

    edit_checkpoint(tmp_path / "model", edit)
    assert "attn.c_proj.weight" in (said := refusal(tmp_path / "model"))
    assert "is a quantised Conv1D" in said


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    "name", ["awq", "gptq act order", "pack 4 zeros", "int8 group", "nf4 nested", "modelopt nvfp4"]
)
def test_random_damage_loads_or_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    """Tensors that are cut, cast, transposed or missing never raise another exception."""
    write_quantized(source, tmp_path / "good", FORMATS[name])
    good = load_file(tmp_path / "good" / FILE)
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    rng, refusals = random.Random(0), []
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda tensor: tensor[:-1] if tensor.ndim else tensor[None],
        lambda tensor: tensor[..., :-1] if tensor.ndim else tensor[None],
        lambda tensor: tensor.reshape(-1),
        lambda tensor: tensor.t() if tensor.ndim == 2 else tensor.flatten()[:0],
        lambda tensor: tensor.to(rng.choice([torch.int32, torch.int8, torch.float16])),
        lambda tensor: tensor[None],
        lambda tensor: torch.zeros((), dtype=tensor.dtype),
        lambda tensor: tensor.float().neg().to(tensor.dtype),
    ]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    for _ in range(60):
        tensors = dict(good)
        for key in rng.sample([key for key in good if key.startswith(LAYER)], rng.choice([1, 2])):
            tensors[key] = rng.choice(changes)(tensors[key]).contiguous()
        save_file(tensors, tmp_path / "bad" / FILE)
        fields = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 2}
        try:
            load_engine(
                EngineConfig(model=str(tmp_path / "bad"), **fields, num_gpu_blocks_override=8)
            )
        except ConfigError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert [said for said in refusals if LAYER not in said] == []


@pytest.mark.parametrize(
    "settings", [AWQ, GPTQ, PACK, FP8, NF4, NVFP4, TORCHAO], ids=lambda s: str(s["quant_method"])
)
def test_settings_of_any_type_are_read_or_refused(settings: dict[str, Any]) -> None:
    """A value of another type never raises another exception, at any depth."""
    values = [None, True, 0, -1, 1e400, "x", [], {}, [[]], {"a": 1}]

    def variants(given: Any) -> list[Any]:
        if not isinstance(given, dict):
            return values
        found = list(values)
        for key, inner in given.items():
            found += [given | {key: other} for other in variants(inner)]
        return found

    keys = ["sparsity_config", "transform_config", "kv_cache_scheme", "dynamic", "pack_dtype"]
    known = settings | dict.fromkeys(keys)
    refused = 0
    for given in variants(known):
        try:
            storage_format({"quantization_config": given})
        except ConfigError:
            refused += 1
    assert refused > 20
