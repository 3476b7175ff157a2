#!/usr/bin/env bash
# torch's embedding_bag with mode="max" leaves NaN out of the maximum on a CPU; "sum" and amax keep it.
#
# Surprising: NaN stays only if it is the first row of the bag. amax, scatter_reduce and segment_reduce
# give NaN wherever it is.
# Versions: torch 2.13.0 on a CPU.
# Why it matters: max pooling by embedding_bag, the fastest one-launch sum, turns broken hidden states
# into finite vectors.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

"$folder/venv/bin/python" - <<'PYTHON'
import torch
import torch.nn.functional as F

print("torch", torch.__version__.partition("+")[0])
rows = torch.tensor([[1.0], [float("nan")], [3.0]])
bags = torch.tensor([0])


def bag(order, mode):
    return F.embedding_bag(torch.tensor(order), rows, bags, mode=mode).item()


index = torch.zeros(3, 1, dtype=torch.int64)
found = {
    "max, NaN second": bag([0, 1, 2], "max"),
    "max, NaN first": bag([1, 0, 2], "max"),
    "sum, NaN second": bag([0, 1, 2], "sum"),
    "amax": rows.amax(0).item(),
    "scatter_reduce": torch.full((1, 1), -torch.inf).scatter_reduce(0, index, rows, "amax").item(),
}
for name, value in found.items():
    print(f"{name}: {value}")
assert [value == value for value in found.values()] == [True, False, False, False, False]
PYTHON
# Output:
#   torch 2.13.0
#   max, NaN second: 3.0
#   max, NaN first: nan
#   sum, NaN second: nan
#   amax: nan
#   scatter_reduce: nan
