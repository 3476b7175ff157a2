#!/usr/bin/env bash
# ONNX Runtime's quantize_dynamic refuses a BERT that ONNX Runtime's own optimiser wrote.
#
# Surprising: both are its documented tools, and the order is the usual one. The error names a type
# that cannot be found and advises an option. With DefaultTensorType=1 (fp32) it works. The reason is
# that ONNX's shape inference knows no types behind the fused operators of com.microsoft.
# Versions: onnxruntime 1.32.0, onnx 1.23.2, transformers 5.24.0, torch 2.13.0 on a CPU.
# Why it matters: a comparison that skips the optimiser for int8 would measure a slower rival.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 onnxscript==0.7.2 \
    transformers==5.24.0

cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers import optimizer
from transformers import BertConfig, BertModel

sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 99}
config = BertConfig(**sizes, num_hidden_layers=2)
config._attn_implementation = "eager"
model = BertModel(config, add_pooling_layer=False).eval()


class States(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


ids = torch.ones(1, 5, dtype=torch.int64)
torch.onnx.export(
    States(), (ids, ids), "plain.onnx", input_names=["ids", "mask"], output_names=["states"],
    opset_version=17, dynamo=False,
)
fused = optimizer.optimize_model("plain.onnx", model_type="bert", num_heads=2, hidden_size=64)
fused.save_model_to_file("fused.onnx")
print("onnxruntime", onnxruntime.__version__)
quantize_dynamic("plain.onnx", "plain8.onnx", weight_type=QuantType.QInt8)
print("plain: quantised")
try:
    quantize_dynamic("fused.onnx", "fused8.onnx", weight_type=QuantType.QInt8)
except RuntimeError as error:
    print("fused:", str(error).partition(" for")[0])
else:
    raise SystemExit("fused: quantised, which it was not before")
options = {"DefaultTensorType": 1}
quantize_dynamic("fused.onnx", "fused8.onnx", weight_type=QuantType.QInt8, extra_options=options)
print("fused, with DefaultTensorType: quantised")
PYTHON
# Output:
#   onnxruntime 1.32.0
#   plain: quantised
#   fused: Unable to find data type
#   fused, with DefaultTensorType: quantised
