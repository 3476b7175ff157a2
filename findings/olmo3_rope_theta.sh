#!/usr/bin/env bash
# transformers reads rope_theta of an OLMo 3 config.json for the layers without a window only.
#
# Surprising: the published config.json has one rope_theta for the model. The layers with a window, three
# of four, get the default of 500000 instead. Published checkpoints have this value, so that no
# answer shows it; a model that was trained with another base is computed wrongly without a word.
# Versions: transformers 5.24.0 (no torch is needed).
# Why it matters: an engine that gives all layers the base of config.json differs from the reference.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0

"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import transformers

print("transformers", transformers.__version__)
config = transformers.Olmo3Config(rope_theta=10000.0)
bases = {kind: given["rope_theta"] for kind, given in config.rope_parameters.items()}
print("rope_theta 10000.0 becomes", dict(sorted(bases.items())))
assert bases == {"full_attention": 10000.0, "sliding_attention": 500000.0}
PYTHON
# Output:
#   transformers 5.24.0
#   rope_theta 10000.0 becomes {'full_attention': 10000.0, 'sliding_attention': 500000.0}
