#!/usr/bin/env bash
# transformers 5.24.0 dequantises fp8 weights with the wrong blocks where the last one is cut off.
# config.json says weight_block_size [128, 128]. A matrix of 192 rows then has two scales: one of rows
# 0 to 127, one of rows 128 to 191. transformers derives the block from the number of scales, 192 / 2,
# and multiplies rows 96 to 127 by the second scale. Its own Linear for GPUs uses 128. If the rows are no
# multiple of the number of scales, it raises an error. A golden test against transformers on a CPU
# would make a correct loader wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0
"$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import json, pathlib, sys
import torch, transformers
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

model = pathlib.Path(sys.argv[1], "model")
model.mkdir()
sizes = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=1)
config = LlamaConfig(vocab_size=16, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
tensors = {}
for name, tensor in LlamaForCausalLM(config).state_dict().items():
    if name.endswith("proj.weight"):
        rows, columns = (-(-size // 128) for size in tensor.shape)
        tensors[name] = torch.ones_like(tensor).to(torch.float8_e4m3fn)
        scales = torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
        tensors[f"{name}_scale_inv"] = scales
    elif name != "lm_head.weight":
        tensors[name] = tensor
save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
settings = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
(model / "config.json").write_text(json.dumps({**settings, "quantization_config": quantised}))
loaded = LlamaForCausalLM.from_pretrained(
    model, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
)
rows = loaded.model.layers[0].mlp.up_proj.weight[:, 0].tolist()
print("transformers", transformers.__version__)
print("scale of rows 0, 95, 96, 127, 128, 191:", [rows[i] for i in (0, 95, 96, 127, 128, 191)])
print("the first row with the second scale:", rows.index(2.0), "(by weight_block_size: 128)")
sys.exit(rows != [1.0] * 96 + [2.0] * 96)
PYTHON
