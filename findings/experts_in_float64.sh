#!/usr/bin/env bash
# transformers' models with experts cannot compute in float64 unless their kernel is chosen by hand.
#
# Surprising: model.double() of a dense model gives the exact reference. A Mixtral raises in its first
# layer, because the default kernel of experts, a grouped matmul of torch, has no float64. The
# implementation "eager" multiplies the experts one by one and works.
# Versions: transformers 5.24.0, torch 2.13.0 on a CPU.
# Why it matters: a comparison with float64 is the only one that is closer than fp32's own rounding.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0

"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
import transformers
from transformers import LlamaConfig, LlamaModel, MixtralConfig, MixtralModel

print("transformers", transformers.__version__, "torch", torch.__version__.partition("+")[0])
sizes = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ids = torch.tensor([[1, 2, 3]])


def outcome(model):
    try:
        return str(model(ids).last_hidden_state.dtype)
    except RuntimeError as error:
        return f"RuntimeError: {error}"


dense = LlamaModel(LlamaConfig(**sizes)).double().eval()
experts = MixtralModel(MixtralConfig(**sizes, num_local_experts=4)).double().eval()
found = {"dense": outcome(dense), "experts": outcome(experts)}
experts.set_experts_implementation("eager")
found["experts, eager"] = outcome(experts)
for name, value in found.items():
    print(f"{name}: {value}")
assert found["dense"] == found["experts, eager"] == "torch.float64"
assert found["experts"].startswith("RuntimeError: Expected mat_a to be Float32")
PYTHON
# Output:
#   transformers 5.24.0 torch 2.13.0
#   dense: torch.float64
#   experts: RuntimeError: Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double
#   experts, eager: torch.float64
