#!/usr/bin/env bash
# transformers 5.24.0 reads three encoders' config.json otherwise than their keys suggest, in silence.
# Nomic Embed: the published files have GPT-2's keys (n_embd, n_layer, n_head, rotary_emb_base). The
# native class passes over them and takes its defaults, which equal v1.5; another model of that code
# becomes 768 wide with 12 layers.
# ModernBERT: sliding_window, which is half of local_attention, overwrites local_attention with twice
# its value. 8 and 9 reach equally far.
# EmbeddingGemma: a sliding_window of 9 is 5 in memory, and 8 in the file that is saved.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0
"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import sys
import transformers
from transformers import Gemma3TextConfig, ModernBertConfig, NomicBertConfig

small = {"n_embd": 96, "n_layer": 2, "n_head": 4, "rotary_emb_base": 500, "layer_norm_epsilon": 0.1}
nomic = NomicBertConfig.from_dict(small)
modern = ModernBertConfig.from_dict({"local_attention": 8, "sliding_window": 6})
reaches = [ModernBertConfig(local_attention=size).sliding_window for size in (8, 9)]
gemma = Gemma3TextConfig(sliding_window=9, use_bidirectional_attention=True)
found = {
    "Nomic: width, layers, heads, base": [
        nomic.hidden_size,
        nomic.num_hidden_layers,
        nomic.num_attention_heads,
        nomic.rope_parameters["rope_theta"],
    ],
    "ModernBERT: local_attention of 8 and sliding_window 6": modern.local_attention,
    "ModernBERT: tokens to each side for 8 and 9": reaches,
    "EmbeddingGemma: 9 in memory and saved": [gemma.sliding_window, gemma.to_dict()["sliding_window"]],
}
print("transformers", transformers.__version__)
for name, value in found.items():
    print(f"{name}: {value}")
sys.exit(list(found.values()) != [[768, 12, 12, 1000.0], 12, [4, 4], [5, 8]])
PYTHON
