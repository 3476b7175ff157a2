"""The target of LoRA adapters: adapter_config.json and the header of the weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

from engine.checkpoint.adapter.config import CONFIG
from engine.checkpoint.adapter.weights import WEIGHTS, StoredAdapter
from engine.errors import ConfigError
from tests.fuzz.mutate import mutate_bytes, mutate_json_bytes
from tests.fuzz.target import Check, Target

MODULE = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
PATTERNS: tuple[dict[str, Any], ...] = (
    {},
    {"rank_pattern": {"q_proj": 2, "up_proj": 3}, "alpha_pattern": {"^model.layers.0": 8}},
    {"rank_pattern": {r"layers\.(0|1)\..*q_proj": 2}, "use_rslora": True},
    {"alpha_pattern": {r"(a+)+$": 1, r".*(q|v)_proj": 2}, "fan_in_fan_out": True},
)


def seeds() -> list[bytes]:
    """The config on the first line, then the header of the weights, then their numbers."""
    header = {
        f"{MODULE}A.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        f"{MODULE}B.weight": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [24, 40]},
    }
    weights = json.dumps(header).encode() + b"\n" + bytes(40)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q"]}
    return [json.dumps({**config, **more}).encode() + b"\n" + weights for more in PATTERNS]


def mutate(random: Random, data: bytes) -> bytes:
    config, _, weights = data.partition(b"\n")
    header, _, numbers = weights.partition(b"\n")
    match random.randrange(4):
        case 0:
            header = mutate_json_bytes(random, header)
        case 1:
            numbers = mutate_bytes(random, numbers)
        case _:
            config = mutate_json_bytes(random, config)
    return b"\n".join((config, header, numbers))


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Check]:
    async def check(data: bytes) -> None:
        config, _, weights = data.partition(b"\n")
        header, _, numbers = weights.partition(b"\n")
        (folder / CONFIG).write_bytes(config)
        (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + numbers)
        with contextlib.suppress(ConfigError):
            adapter = StoredAdapter.open(str(folder))
            assert adapter.rank > 0
            for module in adapter.modules.values():
                low_rank = module.read()
                assert low_rank.a.shape[0] == low_rank.b.shape[1] == module.rank

    yield check


TARGET = Target("adapter", seeds, mutate, opened)
