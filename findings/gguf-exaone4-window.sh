#!/usr/bin/env bash
# llama.cpp reads the sliding window of an EXAONE 4 file only if the model has exactly 64 layers.
#
# Surprising: (1) with another number of layers, exaone4.attention.sliding_window changes no bit of the
# answer, and all layers have rotary embedding; (2) with 64 layers, a file without the key has a window
# of 4096, and so global layers without rotary embedding.
# Versions: xllamacpp 2026.10.11549 (llama.cpp of October 2026), gguf 0.19.0.
# Why it matters: an importer that reads the window from the file differs from llama.cpp on pruned or
# small EXAONE 4 models.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0

cat >"$folder/window.py" <<'PYTHON'
import importlib.metadata
import json
import os
import sys

import numpy as np
from gguf import GGUFWriter
from xllamacpp import CommonParams, Server

TOKENS = ["<unk>", "<s>", "</s>", *(a + b for a in "abcdefgh" for b in "abcdefgh")]


def write(path, layers, window):
    draw, count = np.random.RandomState(0), len(TOKENS)
    writer = GGUFWriter(path, "exaone4")
    sizes = dict(block_count=layers, context_length=256, embedding_length=32, feed_forward_length=32)
    for key, value in (sizes | {"attention.head_count": 2}).items():
        writer.add_uint32(f"exaone4.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    if window:
        writer.add_sliding_window(window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (count - 3))
    writer.add_token_scores([0.0] * count)
    shapes = {"token_embd": (count, 32), "output": (count, 32)}
    norms = {"output_norm": 32}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for block in range(layers):
        shapes |= {f"blk.{block}.{name}": (32, 32) for name in parts}
        norms |= {f"blk.{block}.{name}_norm": 32 for name in ("post_attention", "post_ffw")}
        norms |= {f"blk.{block}.attn_{name}_norm": 16 for name in "qk"}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32) * 0.3)
    for name, size in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def next_tokens(layers, window):
    """The five most probable tokens and their logarithms."""
    path = os.path.join(sys.argv[1], "tiny.gguf")
    write(path, layers, window)
    reader, writer = os.pipe()
    if os.fork() == 0:
        params = CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, 256, 1
        params.warmup, params.n_gpu_layers, params.cpuparams.n_threads = False, 0, 1
        request = {"prompt": [1, *range(5, 60)], "n_predict": 1, "temperature": 0, "n_probs": 5}
        found = Server(params).handle_completions(request | {"ignore_eos": True})
        [token] = found["choices"][0]["logprobs"]["content"]
        pairs = [[entry["id"], entry["logprob"]] for entry in token["top_logprobs"]]
        os.write(writer, json.dumps(pairs).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found = json.loads(stream.read())
    os.wait()
    return found


print("xllamacpp", importlib.metadata.version("xllamacpp"))
for layers in (4, 63, 64, 65):
    same = next_tokens(layers, 8) == next_tokens(layers, None)
    print(f"{layers} layers, a window of 8 tokens: {'the same' if same else 'other numbers'}")
    assert same == (layers != 64)
same = next_tokens(64, 4096) == next_tokens(64, None)
print(f"64 layers, a window of 4096 tokens: {'the same' if same else 'other numbers'}")
assert same
PYTHON
"$folder/venv/bin/python" "$folder/window.py" "$folder" 2>/dev/null
# Output:
#   xllamacpp 2026.10.11549
#   4 layers, a window of 8 tokens: the same
#   63 layers, a window of 8 tokens: the same
#   64 layers, a window of 8 tokens: other numbers
#   65 layers, a window of 8 tokens: the same
#   64 layers, a window of 4096 tokens: the same
