#!/bin/sh
# Compile the C file that Triton would compile on its first launch, so that the image needs no
# compiler.
#   build.sh PYTHON TARGET
# Triton 3.7 compiles only its driver.c with a C compiler. Kernels are compiled by ptxas, which is
# part of its wheel. The library is linked against an empty libcuda; the host's driver provides the
# real one.
set -eu
python=$1 target=$2
here=$(dirname "$0")
nvidia=$("$python" -c 'import importlib.util as u; print(u.find_spec("triton").submodule_search_locations[0])')/backends/nvidia
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
if grep -q compile_module_from_src "$nvidia/../../compiler/compiler.py" \
    || [ "$(grep -c 'compile_module_from_src(' "$nvidia/driver.py")" != 1 ]; then
    echo "build.sh: this version of Triton compiles more than driver.c; see $nvidia/driver.py" >&2
    exit 1
fi
empty=$(mktemp -d)
gcc -shared -Wl,-soname,libcuda.so.1 -o "$empty/libcuda.so.1" -x c /dev/null
mkdir -p "$target"
gcc "$nvidia/driver.c" -O3 -shared -fPIC -Wno-psabi -o "$target/cuda_utils.so" \
    -Wl,--no-as-needed "-L$empty" -l:libcuda.so.1 "-I$nvidia/include" "-I$headers"
rm -r "$empty"
cp "$nvidia/driver.c" "$target/cuda_utils.c"
install -m 755 "$here/cc" "$target/cc"
