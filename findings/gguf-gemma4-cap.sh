#!/usr/bin/env bash
# llama.cpp caps the logits of a Gemma 4 file at 30 if the file does not mention a cap.
#
# Surprising: (1) without gemma4.final_logit_softcapping, the numbers are those of a cap of 30; only 0
# means none; (2) llama.cpp's converter writes no such key for a model whose config.json has null, the
# default of transformers: the converted model has other probabilities than the original. (The second
# is read in the converter, conversion/gemma.py of commit 0c1e57098, and not run here.)
# Versions: xllamacpp 2026.10.11549 (llama.cpp of October 2026), gguf 0.19.0.
# Why it matters: greedy answers are equal, but sampling and log-probabilities are not. An importer has
# to choose between the program and the original.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0

cat >"$folder/cap.py" <<'PYTHON'
import importlib.metadata
import json
import os
import sys

import numpy as np
from gguf import GGUFWriter
from xllamacpp import CommonParams, Server

TOKENS = ["<unk>", "<s>", "</s>", *(a + b for a in "abcdefgh" for b in "abcdefgh")]
HIDDEN, WIDTH = 32, 16


def write(path, cap):
    draw, count = np.random.RandomState(0), len(TOKENS)
    writer = GGUFWriter(path, "gemma4")
    sizes = dict(block_count=2, context_length=64, embedding_length=HIDDEN, feed_forward_length=32)
    sizes |= {"attention.head_count": 2, "attention.sliding_window": 8}
    sizes |= {"embedding_length_per_layer_input": 0}
    widths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    sizes |= {f"{key}{kind}": WIDTH for key in widths for kind in ("", "_swa")}
    for key, value in sizes.items():
        writer.add_uint32(f"gemma4.{key}", value)
    writer.add_array("gemma4.attention.sliding_window_pattern", [True, False])
    writer.add_layer_norm_rms_eps(1e-5)
    if cap is not None:
        writer.add_final_logit_softcapping(cap)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (count - 3))
    writer.add_token_scores([0.0] * count)
    shapes = {"token_embd": (count, HIDDEN)}
    norms = {"output_norm": HIDDEN, "rope_freqs": WIDTH // 2}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for block in range(2):
        shapes |= {f"blk.{block}.{name}": (HIDDEN, HIDDEN) for name in parts}
        of_hidden = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        norms |= {f"blk.{block}.{name}": HIDDEN for name in of_hidden}
        norms |= {f"blk.{block}.attn_{name}_norm": WIDTH for name in "qk"}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape).astype(np.float32))
    for name, size in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def next_tokens(cap):
    """The five most probable tokens and their logarithms."""
    path = os.path.join(sys.argv[1], "tiny.gguf")
    write(path, cap)
    reader, writer = os.pipe()
    if os.fork() == 0:
        params = CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = path, 64, 1
        params.warmup, params.n_gpu_layers, params.cpuparams.n_threads = False, 0, 1
        request = {"prompt": [1, *range(5, 30)], "n_predict": 1, "temperature": 0, "n_probs": 5}
        found = Server(params).handle_completions(request | {"ignore_eos": True})
        [token] = found["choices"][0]["logprobs"]["content"]
        pairs = [[entry["id"], round(entry["logprob"], 4)] for entry in token["top_logprobs"]]
        os.write(writer, json.dumps(pairs).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found = json.loads(stream.read())
    os.wait()
    return found


print("xllamacpp", importlib.metadata.version("xllamacpp"))
absent, given, none = next_tokens(None), next_tokens(30.0), next_tokens(0.0)
for name, found in (("no key", absent), ("30", given), ("0", none)):
    print(f"final_logit_softcapping {name}: {found[:2]}")
assert absent == given != none
assert [token for token, _ in absent] == [token for token, _ in none]
PYTHON
"$folder/venv/bin/python" "$folder/cap.py" "$folder" 2>/dev/null
# Output:
#   xllamacpp 2026.10.11549
#   final_logit_softcapping no key: [[29, -0.0], [3, -11.3328]]
#   final_logit_softcapping 30: [[29, -0.0], [3, -11.3328]]
#   final_logit_softcapping 0: [[29, 0.0], [3, -19.5056]]
