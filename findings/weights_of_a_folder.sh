#!/usr/bin/env bash
# transformers 5.24.0 and the files of weights in a folder. A folder often holds the same model twice
# (consolidated.safetensors), an adapter, or shards of an earlier save. What surprises:
# - model.safetensors wins over model.safetensors.index.json, so an index that was written later, with
#   its shards, is not read at all;
# - shards without an index are no model, although their names say which part each one is;
# - `transformers_weights` in config.json replaces both names, and an index that it names in a
#   subfolder lists files relative to the model's folder, not to its own.
# A server that loads every *.safetensors reads tensors twice, or stops.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import json, pathlib, shutil, sys
import torch, transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

root = pathlib.Path(sys.argv[1])
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
config = LlamaConfig(vocab_size=16, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
weights = LlamaForCausalLM(config).state_dict()
weights.pop("lm_head.weight")
SHARD, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
OTHER = "sub/other.safetensors.index.json"


def loaded(files, **settings):
    """Return the value of the weights that are loaded; each file has all weights, of one value."""
    model = root / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**config.to_dict(), **settings}))
    for name, value in files.items():
        (model / name).parent.mkdir(exist_ok=True)
        if isinstance(value, str):
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights, value)}
            (model / name).write_text(json.dumps(index))
        else:
            tensors = {key: torch.full_like(tensor, value) for key, tensor in weights.items()}
            save_file(tensors, model / name, metadata={"format": "pt"})
    try:
        return LlamaForCausalLM.from_pretrained(model).model.embed_tokens.weight[0, 0].item()
    except OSError as error:
        return "refused" if "no file named model.safetensors" in str(error) else repr(error)


cases = [
    ("file 1, index of 2", {"model.safetensors": 1.0, SHARD: 2.0, INDEX: SHARD}, {}, 1.0),
    ("index of 2 only", {SHARD: 2.0, INDEX: SHARD}, {}, 2.0),
    ("file 1, consolidated 2", {"model.safetensors": 1.0, "consolidated.safetensors": 2.0}, {}, 1.0),
    ("shards without an index", {SHARD: 1.0}, {}, "refused"),
    ("only a variant", {"model.fp16.safetensors": 1.0}, {}, "refused"),
    (
        "config names an index in a subfolder",
        {"model.safetensors": 1.0, "x.safetensors": 2.0, "sub/x.safetensors": 3.0, OTHER: "x.safetensors"},
        {"transformers_weights": OTHER},
        2.0,
    ),
]
print("transformers", transformers.__version__)
failed = False
for name, files, settings, due in cases:
    found = loaded(files, **settings)
    print(f"{name}: {found}")
    failed |= found != due
sys.exit(failed)
PYTHON
