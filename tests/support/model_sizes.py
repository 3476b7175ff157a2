"""Which model fits which machine, planned from published sizes.

`python -m tests.support.model_sizes` prints the table of docs/model-sizes.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.memory.model_plan import ModelPlan
from loadtest.gpu.models import CONFIGS, ROPE_LLAMA_3, write_model

GB = 10**9
MACHINES = (2, 4, 8, 16, 24, 32, 48, 64, 80, 96)  # GB of a computer's or a GPU's memory
PROCESS = GB  # programs, and the working memory of a step
KV_TOKENS = 32768  # in the KV cache, for all requests together
SHARE = 0.9  # of the memory that Penstock may take


def llama_like(name: str, *sizes: int, **more: Any) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = sizes
    return {
        "architectures": [f"{name}ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | more


TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 128}
# As published in each model's config.json.
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": llama_like("Llama", 576, 1536, 30, 9, 3, 49152, **TIED),
    "Qwen3-0.6B": CONFIGS["qwen3-0.6b"],
    "Llama-3.2-1B": llama_like(
        "Llama", 2048, 8192, 16, 32, 8, 128256, rope_scaling=ROPE_LLAMA_3, **TIED
    ),
    "Qwen2.5-1.5B": llama_like("Qwen2", 1536, 8960, 28, 12, 2, 151936, **TIED),
    "gemma-2-2b": CONFIGS["gemma-2-2b"],
    "Llama-3.2-3B": llama_like(
        "Llama", 3072, 8192, 28, 24, 8, 128256, rope_scaling=ROPE_LLAMA_3, **TIED
    ),
    "Qwen3-4B": llama_like("Qwen3", 2560, 9728, 36, 32, 8, 151936, **TIED, **WIDE),
    "Mistral-7B-v0.3": llama_like("Mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None),
    "Llama-3.1-8B": CONFIGS["llama-3.1-8b"],
    "gemma-2-9b": CONFIGS["gemma-2-9b"],
    "Qwen3-14B": llama_like("Qwen3", 5120, 17408, 40, 40, 8, 151936, **WIDE),
    "Qwen2.5-32B": llama_like("Qwen2", 5120, 27648, 64, 40, 8, 152064),
}


def row(name: str, config: dict[str, Any], folder: Path) -> str:
    """Return the line of docs/model-sizes.md for one model in bfloat16."""
    model = write_model(config, folder)
    plan = ModelPlan(EngineConfig(model=str(model), device="cpu", dtype="bfloat16", prepack=False))
    blocks = KV_TOKENS // plan.config.block_size
    kv_bytes = blocks * plan.block_bytes * len(plan.kv_groups)
    needed = plan.weight_bytes + kv_bytes + PROCESS
    machine = next(size for size in MACHINES if needed <= SHARE * size * GB)
    cells = [
        name,
        f"{plan.num_parameters / GB:.2f}",
        f"{plan.weight_bytes / GB:.1f}",
        f"{kv_bytes / GB:.1f}",
        f"{machine}",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> list[str]:
    """Return the lines of the table, without its head."""
    with tempfile.TemporaryDirectory() as folder:
        return [row(name, config, Path(folder, name)) for name, config in MODELS.items()]


if __name__ == "__main__":
    print("\n".join(table()))
