"""Models from quantised checkpoints against `transformers` with the numbers of the definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import WEIGHTS_INDEX
from engine.checkpoint.tensors import checkpoint_tensors
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from tests.support.driver import Driver
from tests.support.forward import forward, whole
from tests.support.golden import TOLERANCE, edit_checkpoint, load, of_transformers
from tests.support.quantized_files import FORMATS, write_quantized
from tests.support.ranks import ranked

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
STEPS = 20
PROMPT = torch.randint(288, (50,), generator=torch.Generator().manual_seed(1)).tolist()
OF_QWEN2 = ["awq", "gptq act order", "int8 channel", "pack 4 zeros", "fp8 blocks"]
# The first format of each method, with codes that can be kept and without.
OF_EACH_KIND = {
    (form.settings["quant_method"], form.keeps_codes): name
    for name, form in reversed(FORMATS.items())
}
Reference = tuple[Any, Path]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    return of_transformers(LlamaConfig(**SIZES, **HEADS), folder), folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("qwen2") / "checkpoint"
    return of_transformers(Qwen2Config(**SIZES, **HEADS), folder), folder


def logits_of(folder: Path) -> torch.Tensor:
    return forward(load(folder), [PROMPT], whole([PROMPT]))[0]


def check(reference: Reference, folder: Path, name: str) -> None:
    """Compare logits and greedy tokens with `transformers`, whose weights become the numbers."""
    model, source = reference
    numbers = write_quantized(source, folder, FORMATS[name])
    driver = Driver(folder)
    request = driver.submit(PROMPT, STEPS, temperature=0)
    driver.run()
    found = driver.tokens(request)
    with torch.inference_mode():
        for parameter, given in numbers.items():
            model.get_parameter(parameter).copy_(torch.from_numpy(given))
        due = model(torch.tensor([[*PROMPT, *found[:-1]]])).logits[0]
    torch.testing.assert_close(logits_of(folder), due[: len(PROMPT)], **TOLERANCE)
    assert found == due[len(PROMPT) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.variants(4)
def test_llama_equals_transformers(name: str, llama: Reference, tmp_path: Path) -> None:
    check(llama, tmp_path / "model", name)


@pytest.mark.parametrize("name", OF_QWEN2)
def test_qwen2_with_biases_equals_transformers(name: str, qwen2: Reference, tmp_path: Path) -> None:
    check(qwen2, tmp_path / "model", name)


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", OF_EACH_KIND.values())
def test_two_ranks_answer_like_one(name: str, llama: Reference, tmp_path: Path) -> None:
    """Each rank keeps the weights of its outputs or inputs."""
    folder = tmp_path / "model"
    write_quantized(llama[1], folder, FORMATS[name])
    alone = Driver(folder)
    due = alone.submit(PROMPT, STEPS, temperature=0, logprobs=0)
    alone.run()
    with ranked(folder, tmp_path / "ranks") as driver:
        request = driver.submit(PROMPT, STEPS, temperature=0, logprobs=0)
        driver.run()
        assert driver.tokens(request) == alone.tokens(due)
        assert driver.logprobs(request) == pytest.approx(alone.logprobs(due), abs=1e-3)


@pytest.mark.parametrize("architecture", ["Phi3", "GPTNeoX"])
def test_fused_layers_equal_transformers(architecture: str, tmp_path: Path) -> None:
    """One tensor has q, k and v: one after the other, or head by head."""
    import transformers

    heads = HEADS if architecture == "Phi3" else HEADS | {"num_key_value_heads": 4}
    config = getattr(transformers, f"{architecture}Config")(**SIZES, **heads, pad_token_id=None)
    reference = of_transformers(config, tmp_path / "source"), tmp_path / "source"
    check(reference, tmp_path / "model", "awq")


def test_rounding_is_seen(llama: Reference, tmp_path: Path) -> None:
    """Another format gives other logits, so the comparisons above can fail."""
    for name in ("awq", "gptq 4"):
        write_quantized(llama[1], tmp_path / name, FORMATS[name])
    found = [logits_of(tmp_path / name) for name in ("awq", "gptq 4")]
    assert (found[0] - found[1]).abs().max() > 0.1


def test_tensors_of_a_layer_may_be_in_two_files(llama: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_quantized(llama[1], folder, FORMATS["gptq 4"])
    due = logits_of(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": where}))
    assert torch.equal(logits_of(folder), due)


@pytest.mark.parametrize("name", ["int8 channel", "fp8 tensor", "modelopt fp8"])
def test_scales_of_activations_are_not_used(name: str, llama: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_quantized(llama[1], folder, FORMATS[name], kv_cache_scheme={"num_bits": 8})
    due = logits_of(folder)

    def add(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for base in [key.removesuffix("weight") for key in tensors if key.endswith("_proj.weight")]:
            tensors[f"{base}input_scale"] = torch.tensor(0.25)
            if "k_proj" in base:
                tensors[f"{base}k_scale"] = torch.tensor(0.5)
                tensors[base.replace("k_proj.", "v_scale")] = torch.tensor(0.5)

    edit_checkpoint(folder, add)
    assert torch.equal(logits_of(folder), due)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantization_rounds_the_numbers_of_the_checkpoint(
    kind: Any, llama: Reference, tmp_path: Path
) -> None:
    """--quantization on top gives the bits of --quantization of the dequantised checkpoint."""
    folder, plain = tmp_path / "model", tmp_path / "plain"
    numbers = write_quantized(llama[1], folder, FORMATS["awq"])
    plain.mkdir()
    tensors = load_file(llama[1] / "model.safetensors")
    for name, given in numbers.items():
        tensors[name] = torch.from_numpy(given)
    save_file(tensors, plain / "model.safetensors")
    (plain / "config.json").write_text((llama[1] / "config.json").read_text())
    answers = []
    for model in (folder, plain):
        driver = Driver(model, quantization=kind)
        request = driver.submit(PROMPT, STEPS, temperature=0, logprobs=0)
        driver.run()
        answers.append((driver.tokens(request), driver.logprobs(request)))
    assert answers[0] == answers[1]


def test_plan_counts_the_weights_that_are_served(llama: Reference, tmp_path: Path) -> None:
    """Parameters and bytes are those of the checkpoint that was quantised."""
    folder = tmp_path / "model"
    write_quantized(llama[1], folder, FORMATS["gptq 4"])
    plans = [
        ModelPlan(EngineConfig(model=str(model), device="cpu", dtype="float32"))
        for model in (folder, llama[1])
    ]
    assert plans[0].num_parameters == plans[1].num_parameters
    assert plans[0].weight_bytes == plans[1].weight_bytes
    facts = [Driver(model).loaded.facts for model in (folder, llama[1])]
    assert facts[0].parameters == facts[1].parameters == plans[1].num_parameters
    assert facts[0].weight_bytes == facts[1].weight_bytes
    assert facts[0].memory == facts[1].memory


def test_facts_have_the_names_of_the_parts_of_weights(llama: Reference, tmp_path: Path) -> None:
    write_quantized(llama[1], tmp_path / "model", FORMATS["awq"])
    facts = Driver(tmp_path / "model").loaded.facts
    assert facts.weight_parts == (".qweight", ".qzeros", ".scales")
    assert Driver(llama[1]).loaded.facts.weight_parts == ()


def test_older_key_of_config_json_is_read(llama: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_quantized(llama[1], folder, FORMATS["pack 4"])
    due = logits_of(folder)
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(folder), due)


def test_zero_biases_that_a_quantizer_added_are_left_out(llama: Reference, tmp_path: Path) -> None:
    """AutoGPTQ stores biases of layers that have none. One that is not zero is refused."""
    folder = tmp_path / "model"
    write_quantized(llama[1], folder, FORMATS["gptq 4"])
    due = logits_of(folder)
    name = "model.layers.1.mlp.down_proj.bias"
    edit_checkpoint(folder, lambda config, tensors: tensors.update({name: torch.zeros(64).half()}))
    assert torch.equal(logits_of(folder), due)
    edit_checkpoint(folder, lambda config, tensors: tensors.update({name: torch.ones(64).half()}))
    with pytest.raises(ConfigError, match=rf"holds {name}, which this architecture does not use"):
        load(folder)


def test_settings_of_modelopt_are_read_from_their_file(llama: Reference, tmp_path: Path) -> None:
    """Older exports leave config.json alone; a setting that is not served is refused there too."""
    folder = tmp_path / "model"
    write_quantized(llama[1], folder, FORMATS["modelopt nvfp4"])
    due = logits_of(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    assert torch.equal(logits_of(folder), due)
    file.write_text(json.dumps({"quantization": settings | {"quant_algo": "NVFP4_SVD"}}))
    with pytest.raises(ConfigError, match=r"quant_algo = 'NVFP4_SVD' .*modelopt; supported: FP8"):
        load(folder)


def test_layers_of_modelopt_may_have_two_algorithms(llama: Reference, tmp_path: Path) -> None:
    """MIXED_PRECISION names the algorithm of each layer; the others are not quantised."""
    folder, other, plain = tmp_path / "model", tmp_path / "other", "model.layers.0.mlp."
    numbers = write_quantized(llama[1], folder, FORMATS["modelopt nvfp4"])
    more = write_quantized(llama[1], other, FORMATS["modelopt fp8"])
    chosen = "model.layers.1.mlp."
    sources = {plain: llama[1], chosen: other}
    kept = load_file(folder / "model.safetensors")
    for start, source in sources.items():
        kept = {name: value for name, value in kept.items() if not name.startswith(start)}
        tensors = load_file(source / "model.safetensors").items()
        kept |= {name: value for name, value in tensors if name.startswith(start)}
    save_file(kept, folder / "model.safetensors")
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    edit_checkpoint(
        folder,
        lambda config, tensors: config.update(
            quantization_config=settings | {"quantized_layers": layers}
        ),
    )
    found = checkpoint_tensors(folder)
    original = load_file(llama[1] / "model.safetensors")
    for name in numbers:
        due = torch.from_numpy(more[name] if name.startswith(chosen) else numbers[name])
        due = original[name] if name.startswith(plain) else due
        assert torch.equal(found[name].read(), due), name
    load(folder)


def test_layers_of_two_groups_are_read_by_their_own(llama: Reference, tmp_path: Path) -> None:
    """In a mixed-precision checkpoint every group has a format, and every layer fits one."""
    first, second = FORMATS["pack 4 zeros"], FORMATS["float channel"]
    folder, other = tmp_path / "model", tmp_path / "other"
    numbers = write_quantized(llama[1], folder, first)
    more = write_quantized(llama[1], other, second)
    tensors = load_file(folder / "model.safetensors")
    chosen = "model.layers.1.mlp."
    kept = {name: value for name, value in tensors.items() if not name.startswith(chosen)}
    floats = load_file(other / "model.safetensors").items()
    kept |= {name: value for name, value in floats if name.startswith(chosen)}
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    groups = {}
    for form in (first, second):
        [group] = form.settings["config_groups"].values()
        groups[form.settings["format"]] = group | {"format": form.settings["format"]}
    config["quantization_config"] |= {"format": "mixed-precision", "config_groups": groups}
    (folder / "config.json").write_text(json.dumps(config))
    found = checkpoint_tensors(folder)
    for name in numbers:
        due = more[name] if name.startswith(chosen) else numbers[name]
        assert torch.equal(found[name].read(), torch.from_numpy(due)), name
    load(folder)
