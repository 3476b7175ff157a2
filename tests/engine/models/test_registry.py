"""The registry gives a class for every name, which reads or refuses a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.image_config import SEEING
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.model_plan import ModelPlan
from engine.models.base import positive
from engine.models.registry import ARCHITECTURES, model_class
from tests.support.driver import tiny_llama
from tests.support.published import PUBLISHED

LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("encoder_layers", "decoder_layers", "depth"),
)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_model_class_every_name_gives_a_class_that_reads_config(name: str) -> None:
    assert model_class({"architectures": ["Unknown", name]})[0] == name
    with pytest.raises(ConfigError):
        model_class({"architectures": [name]})[-1].read_config({})


def test_model_class_accepts_code_that_is_in_transformers() -> None:
    """Microsoft's checkpoints name it. It is not run, as no code of a checkpoint is."""
    name = "Phi3ForCausalLM"
    for source in ("modeling_phi3.", "microsoft/Phi-4-mini-instruct--modeling_phi3."):
        code = {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": source + name,
        }
        assert model_class({"architectures": [name], "auto_map": code})[0] == name
        for other in ({"architectures": ["LlamaForCausalLM"]}, {"architectures": []}):
            with pytest.raises(ConfigError, match="auto_map"):
                model_class({"auto_map": code} | other)
    for wrong in ({"AutoModelForCausalLM": "modeling_evil." + name}, {"AutoConfig": "x.Y"}, "x.Y"):
        with pytest.raises(ConfigError, match="auto_map"):
            model_class({"architectures": [name], "auto_map": wrong})


def test_model_class_many_unknown_names_are_counted() -> None:
    with pytest.raises(ConfigError) as refused:
        model_class({"architectures": [f"A{n}" for n in range(100_000)]})
    assert "Architecture A0, A1, A2, A3, A4 and 99995 more is not served" in str(refused.value)
    with pytest.raises(ConfigError, match="characters left out") as refused:
        model_class({"architectures": ["A" * 1_000_000]})
    assert len(str(refused.value)) < 2000


def test_seeing_architectures_are_those_whose_class_encodes_images() -> None:
    """The server reads images for these. It imports no model, so their names are written down."""
    encoding = set()
    for name in ARCHITECTURES:
        names = getattr(model_class({"architectures": [name]})[-1], "names", {})
        if any(module.startswith("vision.") for module in names):
            encoding.add(name)
    assert set(SEEING) == encoding


def test_every_architecture_has_published_sizes_and_is_in_docs() -> None:
    published = {model_class(config)[-1].__module__ for config in PUBLISHED.values()}
    assert {module for _, module, _ in ARCHITECTURES.values()} <= published
    page = Path("docs/models.md").read_text()
    assert [name for name in ARCHITECTURES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("size", [0, -1, 2**31, 10**24, 1.0, float("inf"), True, "5", [5]])
def test_positive_invalid_size_raises_config_error(size: object) -> None:
    assert positive({"hidden_size": 2**31 - 1}, "hidden_size") == 2**31 - 1
    with pytest.raises(ConfigError, match=r"hidden_size = .* above 0 and below"):
        positive({"hidden_size": size}, "hidden_size")


@pytest.mark.parametrize("name", PUBLISHED)
def test_read_config_too_many_layers_raises_config_error(name: str) -> None:
    model = PUBLISHED[name]
    nested = [key for key in ("text_config", "vision_config") if key in model]
    for part in nested or [""]:
        values = model[part] if part else model
        for key in [key for key in LAYERS if key in values] or ["num_hidden_layers"]:
            changed = values | {key: 10**8}
            with pytest.raises(ConfigError, match=f"{key} = 100000000; it must be .* below 10000"):
                model_class(model)[-1].read_config(model | {part: changed} if part else changed)


@pytest.mark.parametrize(
    ("sizes", "asked", "words"),
    [
        ({"head_dim": 2**31 - 2}, None, "head_dim = .* below 65536"),
        ({"max_position_embeddings": 2**31 - 1}, None, "positions. Set --max-model-len"),
        ({"hidden_size": 2**31 - 1, "vocab_size": 2**31 - 1, "head_dim": 8}, None, "laid out"),
        ({"max_position_embeddings": 2**31 - 1}, 64, None),
    ],
)
def test_model_plan_sizes_beyond_the_machine_raise_config_error(
    tmp_path: Path, sizes: dict[str, Any], asked: int | None, words: str | None
) -> None:
    config = EngineConfig(model=str(tiny_llama(tmp_path)), max_model_len=asked)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    if words:
        with pytest.raises(ConfigError, match=words):
            ModelPlan(config)
    else:
        assert ModelPlan(config).max_model_len == asked
