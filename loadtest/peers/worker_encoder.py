"""A worker for sentence-transformers and ONNX Runtime: texts to vectors, pairs to scores.

It runs in an environment with both. Each line of stdin is a message in JSON, and gets one: {"load":
way, "model": folder}, or {"texts": [...]} or {"pairs": [...]} for what was loaded last. ONNX
Runtime gets a BERT encoder with the fused operators of its own optimiser. With "int8 blocks" each
block of 128 weights has a scale and inputs are rounded block by block; "int8" is its default.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 32
BLOCK = 128
NAMES = ("input_ids", "attention_mask", "token_type_ids")
Compute = Callable[[list[Any]], Any]


def sentence_transformers(folder: Path, dtype: torch.dtype) -> Compute:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts: model.encode(texts, batch_size=BATCH, normalize_embeddings=True)


def cross_encoder(folder: Path, dtype: torch.dtype) -> Compute:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    return lambda pairs: model.predict([tuple(pair) for pair in pairs], batch_size=BATCH)


class OnnxRuntime:
    """An exported encoder with mean pooling. Batches have texts of similar length, padded."""

    def __init__(self, folder: Path, kind: str) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        file = exported(folder, kind)
        self.session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        limits = json.loads((folder / "sentence_bert_config.json").read_text())
        self.tokenizer.enable_truncation(limits["max_seq_length"])

    def __call__(self, texts: list[str]) -> Any:
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda index: len(tokens[index]))
        vectors: Any = [None] * len(texts)
        for first in range(0, len(order), BATCH):
            part = order[first : first + BATCH]
            longest = max(len(tokens[index]) for index in part)
            ids = np.zeros((len(part), longest), np.int64)
            mask = np.zeros_like(ids)
            for row, index in enumerate(part):
                ids[row, : len(tokens[index])] = tokens[index]
                mask[row, : len(tokens[index])] = 1
            inputs = dict(zip(NAMES, (ids, mask, np.zeros_like(ids)), strict=True))
            [hidden] = self.session.run(None, inputs)
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            for index, mean in zip(part, means, strict=True):
                vectors[index] = mean / np.linalg.norm(mean)
        return np.array(vectors)


def exported(folder: Path, kind: str) -> str:
    """Return the path of the model in ONNX's format; export it if there is none yet."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer

    home = Path(sys.prefix) / "exported" / folder.name
    path = home / f"{kind}.onnx"
    if path.exists():
        return str(path)
    home.mkdir(parents=True, exist_ok=True)
    if kind == "fp32":
        plain, config = home / "plain.onnx", json.loads((folder / "config.json").read_text())
        export(folder, plain)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        made = optimizer.optimize_model(
            str(plain), model_type="bert", num_heads=heads, hidden_size=hidden, opt_level=1
        )
        made.save_model_to_file(str(path))
    elif kind == "int8":
        options = {"DefaultTensorType": 1}  # fp32
        quantize_dynamic(
            exported(folder, "fp32"), path, weight_type=QuantType.QInt8, extra_options=options
        )
    else:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        model = onnx.load(exported(folder, "fp32"))
        quantizer = MatMulNBitsQuantizer(
            model, bits=8, block_size=BLOCK, is_symmetric=True, accuracy_level=4
        )
        quantizer.process()
        quantizer.model.save_model_to_file(str(path), use_external_data_format=False)
    return str(path)


def export(folder: Path, path: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> Any:
            return self.model(**dict(zip(NAMES, inputs, strict=True))).last_hidden_state

    example = torch.ones(2, 9, dtype=torch.int64)
    sizes = {name: {0: "batch", 1: "tokens"} for name in (*NAMES, "hidden")}
    torch.onnx.export(
        States().eval(),
        (example, example, torch.zeros_like(example)),
        str(path),
        input_names=list(NAMES),
        output_names=["hidden"],
        dynamic_axes=sizes,
        opset_version=17,
        dynamo=False,
    )


WAYS: dict[str, Callable[[Path], Compute]] = {
    "sentence-transformers bf16": lambda folder: sentence_transformers(folder, torch.bfloat16),
    "sentence-transformers fp32": lambda folder: sentence_transformers(folder, torch.float32),
    "cross-encoder bf16": lambda folder: cross_encoder(folder, torch.bfloat16),
    "onnxruntime fp32": lambda folder: OnnxRuntime(folder, "fp32"),
    "onnxruntime int8 blocks": lambda folder: OnnxRuntime(folder, "int8 blocks"),
    "onnxruntime int8": lambda folder: OnnxRuntime(folder, "int8"),
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries' own output goes to stderr
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loaded: dict[tuple[str, str], Compute] = {}
    compute: Compute = list
    for line in sys.stdin:
        message = json.loads(line)
        if "load" in message:
            key = message["load"], message["model"]
            if key not in loaded:
                loaded[key] = WAYS[message["load"]](Path(message["model"]))
            compute, answer = loaded[key], {}
        else:
            given = message.get("texts") or message["pairs"]
            began = time.monotonic()
            result = compute(given)
            answer = {"seconds": time.monotonic() - began}
            if message.get("wanted"):
                answer["result"] = np.asarray(result, dtype=np.float64).tolist()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
