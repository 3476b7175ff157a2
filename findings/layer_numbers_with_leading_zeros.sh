#!/usr/bin/env bash
# transformers 5.24.0 and per_layer_config of config.json, as in Gemma 4. What surprises:
# - the keys are numbers of layers as text, with leading zeros from ten layers on: "04", not "4";
# - a file with {} and a file without the key differ: without it, global layers get heads of 512;
# - what published checkpoints call global_head_dim is not written again.
# A reader that looks for str(layer) finds no override, and gives all layers the same heads.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/python" - "$folder" 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import json, pathlib, sys
import transformers
from transformers import Gemma4TextConfig

file = pathlib.Path(sys.argv[1]) / "config.json"


def saved(layers, **more):
    Gemma4TextConfig(num_hidden_layers=layers, head_dim=16, **more).save_pretrained(file.parent)
    return json.loads(file.read_text())


def global_width():
    return Gemma4TextConfig.from_pretrained(file.parent).per_layer_config[5].head_dim


few, many = (saved(layers, global_head_dim=32)["per_layer_config"] for layers in (6, 12))
equal = saved(6, global_head_dim=16)
assert "global_head_dim" not in equal
kept = global_width()
del equal["per_layer_config"]
file.write_text(json.dumps(equal))
found = f"keys {list(few)} and {list(many)}; width {kept} with {{}}, {global_width()} without"
print(transformers.__version__, found)
assert found == "keys ['5'] and ['05', '11']; width 16 with {}, 512 without", found
PYTHON
