#!/usr/bin/env bash
# llama.cpp scores the experts of a DeepSeek-V3 file by softmax if the file does not say how.
#
# Surprising: (1) without deepseek2.expert_gating_func, a file with exp_probs_b.bias, which only V3 has, gives
# the numbers of softmax, not of sigmoids. llama.cpp's converter leaves the key out if a config has no
# scoring_func, as configs that transformers 5.24 saves. (2) With yarn but without
# deepseek2.rope.scaling.yarn_log_multiplier, attention is scaled twice: cosines and sines by
# m = 0.1 ln(factor) + 1, and all scores by m^2. transformers scales cosines and sines only.
# Versions: xllamacpp 2026.10.11549 (llama.cpp of October 2026), gguf 0.19.0.
# Why it matters: such a file loads without a message and answers with other tokens than the model.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0

cat >"$folder/scores.py" <<'PYTHON'
import importlib.metadata
import json
import math
import os
import sys

import numpy as np
from gguf import GGUFWriter
from xllamacpp import CommonParams, Server

TOKENS = ["<unk>", "<s>", "</s>", *(a + b for a in "abcdefgh" for b in "abcdefgh")]
HIDDEN, HEADS, LATENT, PLAIN, ROTATED, VALUE, EXPERTS, INNER = 32, 2, 24, 8, 8, 12, 4, 32
KEY, FACTOR = PLAIN + ROTATED, 4.0
SIZES = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 16,
    "attention.kv_lora_rank": LATENT,
    "attention.key_length": LATENT + ROTATED,
    "attention.value_length": LATENT,
    "attention.key_length_mla": KEY,
    "attention.value_length_mla": VALUE,
    "rope.dimension_count": ROTATED,
    "leading_dense_block_count": 1,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": INNER,
    "expert_shared_count": 1,
}
YARN = {"rope.scaling.factor": FACTOR, "rope.scaling.yarn_log_multiplier": 0.1}


def write(path, changes, rotated_scale):
    draw, count = np.random.RandomState(0), len(TOKENS)
    writer = GGUFWriter(path, "deepseek2")
    for key, value in (SIZES | changes).items():
        if value is not None:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"deepseek2.{key}", value)
    if "rope.scaling.factor" in changes:
        writer.add_string("deepseek2.rope.scaling.type", "yarn")
        writer.add_uint32("deepseek2.rope.scaling.original_context_length", 64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (count - 3))
    writer.add_token_scores([0.0] * count)
    shapes = {"token_embd": (count, HIDDEN), "output": (count, HIDDEN), "output_norm": (HIDDEN,)}
    attention = {
        "attn_norm": (HIDDEN,),
        "attn_q_a": (16, HIDDEN),
        "attn_q_a_norm": (16,),
        "attn_q_b": (HEADS * KEY, 16),
        "attn_kv_a_mqa": (LATENT + ROTATED, HIDDEN),
        "attn_kv_a_norm": (LATENT,),
        "attn_k_b": (HEADS, LATENT, PLAIN),
        "attn_v_b": (HEADS, VALUE, LATENT),
        "attn_output": (HIDDEN, HEADS * VALUE),
        "ffn_norm": (HIDDEN,),
    }
    dense = dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (INNER, HIDDEN))
    mixture = {f"{part}_exps": (EXPERTS, INNER, HIDDEN) for part in dense}
    mixture |= {f"{part}_shexp": shape for part, shape in dense.items()}
    mixture["ffn_gate_inp"] = (EXPERTS, HIDDEN)
    for block, network in enumerate((dense, mixture)):
        shapes |= {f"blk.{block}.{part}": shape for part, shape in (attention | network).items()}
    for name, shape in shapes.items():
        numbers = draw.standard_normal(shape).astype(np.float32) * 0.3
        if name.endswith("norm"):
            numbers = np.ones(shape, np.float32)
        if name.endswith("attn_q_b"):
            numbers.reshape(HEADS, KEY, -1)[:, PLAIN:] *= rotated_scale
        if name.endswith("attn_kv_a_mqa"):
            numbers[LATENT:] *= rotated_scale
        writer.add_tensor(f"{name}.weight", numbers)
    bias = draw.standard_normal(EXPERTS).astype(np.float32) * 0.1
    writer.add_tensor("blk.1.exp_probs_b.bias", bias)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def next_tokens(changes, rotated_scale=1.0):
    """The logarithms of the five most probable tokens, by token."""
    path = os.path.join(sys.argv[1], "tiny.gguf")
    write(path, changes, rotated_scale)
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
    return dict(found)


def are_equal(one, other):
    return one.keys() == other.keys() and all(abs(one[key] - other[key]) < 0.02 for key in one)


def report(what, same):
    print(f"{what}: {'the same' if same else 'other numbers'}")
    return same


print("xllamacpp", importlib.metadata.version("xllamacpp"))
silent, softmax, sigmoid = (next_tokens({"expert_gating_func": kind}) for kind in (None, 1, 2))
assert report("no expert_gating_func, and softmax", are_equal(silent, softmax))
assert not report("no expert_gating_func, and sigmoids", are_equal(silent, sigmoid))
m = 0.1 * math.log(FACTOR) + 1
without = next_tokens(YARN | {"rope.scaling.yarn_log_multiplier": None})
# With the multiplier, llama.cpp scales scores by m^2 and leaves cosines and sines.
assert not report("no multiplier, and scores times m^2", are_equal(without, next_tokens(YARN)))
both = next_tokens(YARN, rotated_scale=m)
assert report("no multiplier, and scores times m^2 with rotated parts times m", are_equal(without, both))
PYTHON
"$folder/venv/bin/python" "$folder/scores.py" "$folder" 2>/dev/null
# Output:
#   xllamacpp 2026.10.11549
#   no expert_gating_func, and softmax: the same
#   no expert_gating_func, and sigmoids: other numbers
#   no multiplier, and scores times m^2: other numbers
#   no multiplier, and scores times m^2 with rotated parts times m: the same
