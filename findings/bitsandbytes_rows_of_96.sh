#!/usr/bin/env bash
# bitsandbytes 0.50.2 decodes 4-bit weights wrongly on a CPU if blocks cross the ends of rows.
# A matrix of 48 x 96 in blocks of 64 (the default of transformers) has a block over the end of each odd
# row. quantize_4bit counts blocks through the whole matrix. dequantize_4bit of the CPU's native kernel
# does not, and is wrong by four times the largest error of rounding. The stored codes and scales are
# right: codes times scales, the first code of a byte in its upper half, give the matrix back. 64 x 128 is
# decoded well, and so is 3 x 50, which its portable code decodes. A loader that is tested against the library on such a
# matrix would be made wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet bitsandbytes==0.50.2 numpy==2.4.6
"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import sys
import bitsandbytes, torch
from bitsandbytes import functional

BLOCK = 64
torch.manual_seed(0)
print("bitsandbytes", bitsandbytes.__version__)
seen = {}
for rows, columns in ((64, 128), (48, 96)):
    weight = torch.randn(rows, columns)
    stored, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK)
    found = functional.dequantize_4bit(stored, state)
    data = stored.flatten()
    codes = torch.stack((data >> 4, data & 15), -1).flatten().long()
    scales = state.absmax.repeat_interleave(BLOCK)[: weight.numel()]
    by_definition = (state.code[codes] * scales).view_as(weight)
    seen[columns] = (found - weight).abs().max().item(), (by_definition - weight).abs().max().item()
    print(f"{rows} x {columns}: largest error of dequantize_4bit {seen[columns][0]:.2f},",
          f"of codes times scales {seen[columns][1]:.2f}")
ok = seen[128][0] == seen[128][1] < 0.7 and seen[96][1] < 0.7 and seen[96][0] > 1.5
sys.exit(not ok)
PYTHON
