#!/usr/bin/env bash
# Triton 3.4.0 documents `gdc_wait` and `gdc_launch_dependents`, the device functions of
# programmatic dependent launch, but no kernel that calls one compiles: its front end passes the
# builder to them as `_semantic`, and they take it as `_builder`. The error names neither the
# version nor the function's module. Triton 3.6.0 compiles the same kernel.
#
# Seen: 3.4.0 "unexpected keyword argument '_semantic'"; 3.6.0 griddepcontrol.wait in the PTX.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/kernel.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(x_ptr):
    tl.extra.cuda.gdc_wait()
    tl.store(x_ptr, 1)


source = ASTSource(kernel, {"x_ptr": "*i32"}, {})
try:
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    seen = "griddepcontrol.wait" in found.asm["ptx"]
    print(triton.__version__, "compiles, waits:", seen)
except Exception as error:
    cause = error.__cause__ or error
    print(triton.__version__, type(cause).__name__, "_semantic" in f"{error} {cause}")
PYTHON

for version in 3.4.0 3.6.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q "setuptools==80.9.0" "triton==$version"
  TRITON_CACHE_DIR="$folder/cache-$version" "$folder/$version/bin/python" "$folder/kernel.py" |
    tee -a "$folder/seen"
done

grep -q "^3.4.0 TypeError True$" "$folder/seen"
grep -q "^3.6.0 compiles, waits: True$" "$folder/seen"
