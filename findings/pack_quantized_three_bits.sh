#!/usr/bin/env bash
# compressed-tensors has written two layouts of 3, 5, 6 and 7 bits under the one name
# `pack-quantized`. Version 0.15.0 fills each word of 32 bits with whole codes: 32 codes of 3 bits take
# four words, ten codes in each and two bits unused. Version 0.20.1 packs codes across words: three
# words. Nothing in config.json tells them from each other. 2, 4 and 8 bits are the same in both.
# A loader of such a checkpoint has to look at shapes, which agree for some widths, or refuse it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/pack.py" <<'PYTHON'
import importlib, json, pkgutil
import compressed_tensors, torch

for module in pkgutil.walk_packages(compressed_tensors.__path__, "compressed_tensors."):
    if module.name.endswith((".pack_quantized", ".helpers", ".base", ".format")):
        try:
            found = getattr(importlib.import_module(module.name), "pack_to_int32", None)
        except ImportError:
            continue
        if found:
            break
words = {}
for bits in (2, 3, 4, 5, 6, 7, 8):
    codes = torch.arange(32, dtype=torch.int32).reshape(1, 32) % 2**bits - 2 ** (bits - 1)
    words[bits] = [hex(word & 0xFFFFFFFF) for word in found(codes.to(torch.int8), bits)[0].tolist()]
print(json.dumps(words))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet psutil==7.2.2
for version in 0.15.0 0.20.1; do
  "$folder/venv/bin/pip" install --quiet transformers==5.24.0 "compressed-tensors==$version"
  "$folder/venv/bin/python" "$folder/pack.py" 2> "$folder/log" > "$folder/$version.json" \
    || { cat "$folder/log"; exit 1; }
done
python3 - "$folder" <<'PYTHON'
import json, sys

old, new = (json.load(open(f"{sys.argv[1]}/{version}.json")) for version in ("0.15.0", "0.20.1"))
for bits in old:
    same = "same" if old[bits] == new[bits] else "DIFFERENT"
    print(f"{bits} bits: {len(old[bits])} and {len(new[bits])} words, {same}: {old[bits][0]} {new[bits][0]}")
sys.exit([bits for bits in old if old[bits] != new[bits]] != ["3", "5", "6", "7"])
PYTHON
