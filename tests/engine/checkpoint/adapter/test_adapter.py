"""Reading PEFT adapters: the scale of each module, and a refusal of everything not applied."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.adapter import weights
from engine.checkpoint.adapter.weights import StoredAdapter
from engine.errors import ConfigError
from tests.support.adapters import PREFIX, Tensors, write_adapter

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


def pair(module: str, rank: int = 2) -> Tensors:
    return {
        f"{PREFIX}{module}.lora_A.weight": torch.ones(rank, 6),
        f"{PREFIX}{module}.lora_B.weight": torch.ones(4, rank),
    }


def read(folder: Path) -> None:
    for module in StoredAdapter.open(str(folder)).modules.values():
        module.read()


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read(folder)
    return str(refused.value)


def test_adapter_modules_have_base_names_and_scaled_numbers(tmp_path: Path) -> None:
    stored = StoredAdapter.open(str(write_adapter(tmp_path, pair(Q), lora_alpha=6)))
    assert list(stored.modules) == [Q]
    module = stored.modules[Q]
    assert (module.rank, module.shape, stored.rank) == (2, (4, 6), 2)
    a, b = module.read()
    assert torch.equal(a, torch.ones(2, 6))
    assert torch.equal(b, torch.full((4, 2), 3.0))  # 6 / 2


def test_adapter_scale_with_rslora_divides_by_root_of_rank(tmp_path: Path) -> None:
    stored = StoredAdapter.open(str(write_adapter(tmp_path, pair(Q), use_rslora=True)))
    assert stored.modules[Q].scale == pytest.approx(4 / math.sqrt(2))


def test_adapter_patterns_set_rank_and_alpha_of_matching_modules(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"up_proj": 3}, "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 12}}
    folder = write_adapter(tmp_path, pair(Q) | pair(UP, rank=3), r=2, lora_alpha=4, **patterns)
    modules = StoredAdapter.open(str(folder)).modules
    assert {name: (m.rank, m.scale) for name, m in modules.items()} == {Q: (2, 2), UP: (3, 4)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'; only LORA is supported"),
        ({"use_dora": True}, "use_dora = True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head'], which is not supported"),
        ({"bias": "all"}, "bias = 'all'; only none is supported"),
        ({"of_a_later_peft": 1}, "of_a_later_peft = 1, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "which also changes the base model"),
        ({"r": 0}, "r = 0; it must be a whole number above 0"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x'; it must be a number above 0"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern.q_proj = 1.5; it must be a whole number"),
        ({"alpha_pattern": {"(": 1}}, "pattern '(' in alpha_pattern: it is no regular"),
        ({"alpha_pattern": {"a)|(?:b": 1}}, "it is no regular"),
        ({"alpha_pattern": {"(?=q)q": 1}}, "look-around, including"),
        ({"rank_pattern": {r"(q)\1": 1}}, "backreferences are not supported"),
        ({"rank_pattern": {"(?:a{1000}){1000}": 1}}, "exceeds size limit"),
        ({"rank_pattern": {"q" * 2049: 1}}, "it has 2049 characters; at most 2048 are read"),
        ({"rank_pattern": {f"q.{n}": 1 for n in range(4097)}}, "4097 patterns in rank_pattern"),
        ({"rank_pattern": {f"q{n}+": 1 for n in range(17)}}, "17 regular expressions in rank"),
        ({"rank_pattern": [1]}, "rank_pattern = [1]; it must be an object"),
        ({"r": 3}, "lora_A of shape [2, 6] and lora_B of shape [4, 2]; adapter_config.json asks"),
    ],
)
def test_adapter_config_that_is_not_applied_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    assert message in refusal(write_adapter(tmp_path, pair(Q), **config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(4)}, "lora_magnitude_vector in"),
        ({f"{PREFIX}{Q}.lora_A.weight": torch.full((2, 6), math.nan)}, "holds NaN or infinity"),
        ({f"{PREFIX}{Q}.lora_A.weight": torch.ones(2, 6).int()}, "has dtype I32; supported"),
        ({f"{PREFIX}{UP}.lora_A.weight": torch.ones(2, 6)}, f"has no lora_B of {UP}"),
    ],
)
def test_adapter_tensor_that_does_not_fit_is_refused(
    tmp_path: Path, change: Tensors, message: str
) -> None:
    assert message in refusal(write_adapter(tmp_path, pair(Q) | change))


def test_adapter_folder_without_files_is_refused(tmp_path: Path) -> None:
    assert "has no adapter_config.json" in refusal(tmp_path)
    (write_adapter(tmp_path, pair(Q)) / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors; adapters in other formats" in refusal(tmp_path)


def test_adapter_stamp_differs_once_a_file_is_replaced(tmp_path: Path) -> None:
    before = StoredAdapter.open(str(write_adapter(tmp_path, pair(Q)))).stamp
    assert StoredAdapter.open(str(tmp_path)).stamp == before
    assert StoredAdapter.open(str(write_adapter(tmp_path, pair(UP)))).stamp != before


def test_adapter_with_empty_weights_is_refused(tmp_path: Path) -> None:
    assert "has no tensors" in refusal(write_adapter(tmp_path, {}))


@pytest.mark.parametrize("missing", ["A", "B"])
def test_adapter_without_a_half_is_refused(tmp_path: Path, missing: str) -> None:
    tensors = pair(Q)
    del tensors[f"{PREFIX}{Q}.lora_{missing}.weight"]
    assert f"has no lora_{missing} of {Q}" in refusal(write_adapter(tmp_path, tensors))


@pytest.mark.parametrize("empty", [None, {}])
def test_adapter_with_empty_patterns_has_one_rank(tmp_path: Path, empty: Any) -> None:
    patterns = {"rank_pattern": empty, "alpha_pattern": empty}
    stored = StoredAdapter.open(str(write_adapter(tmp_path, pair(Q), **patterns)))
    assert (stored.modules[Q].rank, stored.modules[Q].scale) == (2, 2)


def test_adapter_module_with_a_long_name_is_refused(tmp_path: Path) -> None:
    message = refusal(write_adapter(tmp_path, pair("m" * 600)))
    assert "is not supported: only lora_A" in message
    assert len(message) < 800


def test_adapter_with_too_many_pairs_to_compare_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_MATCHES", 3)
    folder = write_adapter(tmp_path, pair(Q) | pair(UP), rank_pattern={"a": 1, "b": 1})
    assert "2 modules for the 2 patterns" in refusal(folder)
    folder = write_adapter(tmp_path, pair(Q) | pair(UP), alpha_pattern={"a": 1, "b": 1})
    assert "2 modules for the 2 patterns" in refusal(folder)


def test_adapter_whose_halves_have_other_ranks_is_refused(tmp_path: Path) -> None:
    """The rank of one half is right."""
    for a, b in ((2, 3), (3, 2)):
        tensors = pair(Q, rank=a) | {f"{PREFIX}{Q}.lora_B.weight": torch.ones(4, b)}
        folder = write_adapter(tmp_path, tensors, r=2)
        assert f"lora_A of shape [{a}, 6] and lora_B of shape [4, {b}]" in refusal(folder)
