"""Merging models: each method against a NumPy reference, and the output folder."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import safetensors_header, weight_files
from engine.offline.merge.merge import RECORD, merge
from engine.offline.merge.recipe import parse
from tests.engine.offline.merge.merging import (
    FILE,
    Make,
    Tensors,
    linear,
    random,
    refusal,
    run,
    slerp,
)
from tests.support.driver import Driver
from tests.support.reference_data import LLAMA, located

pytestmark = pytest.mark.usefixtures("one_thread")
INDEX = "model.safetensors.index.json"
ROOT = Path(__file__).resolve().parents[4]
Arrays = list[np.ndarray]


# ---- the methods ------------------------------------------------------------------------------


def reference_linear(arrays: Arrays) -> np.ndarray:
    weights = np.array([0.2, 1.5, -0.3])
    return sum(w * a for w, a in zip(weights / weights.sum(), arrays, strict=True))


def reference_sum(arrays: Arrays) -> np.ndarray:
    return 0.2 * arrays[0] + 1.5 * arrays[1] - 0.3 * arrays[2]


def reference_ema(arrays: Arrays) -> np.ndarray:
    average = arrays[0]
    for array in arrays[1:]:
        average = 0.9 * average + 0.1 * array
    return average


def reference_liti(arrays: Arrays) -> np.ndarray:
    return arrays[0] + 0.3 * (arrays[1] - arrays[0])


def reference_slerp(arrays: Arrays) -> np.ndarray:
    a, b = (array.ravel() for array in arrays[:2])
    cosine = (a / np.linalg.norm(a)) @ (b / np.linalg.norm(b))
    angle = np.arccos(cosine)
    merged = (np.sin(0.7 * angle) * a + np.sin(0.3 * angle) * b) / np.sin(angle)
    return merged.reshape(arrays[0].shape)


METHODS: dict[str, tuple[Callable[[Arrays], np.ndarray], Callable[[list[str]], dict[str, Any]]]] = {
    "linear": (reference_linear, lambda m: linear(m, 0.2, 1.5, -0.3)),
    "sum": (reference_sum, lambda m: linear(m, 0.2, 1.5, -0.3, normalize=False)),
    "ema": (
        reference_ema,
        lambda m: {
            "merge_method": "ema",
            "models": [{"model": model} for model in m],
            "parameters": {"decay": 0.9},
        },
    ),
    "liti": (reference_liti, lambda m: slerp(m[:2], 0.3) | {"merge_method": "liti"}),
    "slerp": (reference_slerp, lambda m: slerp(m[:2], 0.3)),
}


@pytest.mark.parametrize("method", METHODS)
def test_merge_each_method_matches_numpy_reference(
    method: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.checkpoint.stored.CHUNK", 8)  # so that a tensor has several chunks
    models = [random(seed) for seed in range(3)]
    folders = [make(f"m{i}", tensors) for i, tensors in enumerate(models)]
    reference, document = METHODS[method]
    merged = run(tmp_path / "out", **document(folders))
    assert merged.keys() == models[0].keys()
    for name, tensor in merged.items():
        due = reference([tensors[name].double().numpy() for tensors in models])
        np.testing.assert_allclose(tensor.numpy(), due, rtol=1e-5, atol=1e-6)


def test_slerp_at_t_0_and_1_returns_inputs_exactly(make: Make, tmp_path: Path) -> None:
    models = [{n: t.bfloat16() for n, t in random(seed).items()} for seed in range(2)]
    folders = [make(f"m{i}", tensors) for i, tensors in enumerate(models)]
    for t in (0, 1):
        merged = run(tmp_path / f"out{t}", **slerp(folders, t))
        assert all(torch.equal(merged[name], models[t][name]) for name in merged)


def test_slerp_of_equal_norms_preserves_norm(make: Make, tmp_path: Path) -> None:
    a = random(0)["a.weight"]
    b = random(1)["a.weight"]
    b *= a.norm() / b.norm()
    merged = run(tmp_path / "out", **slerp([make("a", {"x": a}), make("b", {"x": b})], 0.5))["x"]
    assert merged.norm() == pytest.approx(a.norm().item(), rel=1e-5)
    assert (a + b).norm() / 2 < 0.9 * a.norm()


@pytest.mark.parametrize("factor", [-1.0, -3.0, 1.0, 1.001, 0.0])
def test_slerp_parallel_or_zero_tensors_falls_back_to_linear(
    factor: float, make: Make, tmp_path: Path
) -> None:
    """Antiparallel, parallel and zero tensors."""
    a = random(0)["a.weight"]
    folders = [make("a", {"x": a}), make("b", {"x": factor * a})]
    merged = run(tmp_path / "out", **slerp(folders, 0.25))["x"]
    torch.testing.assert_close(merged, (0.75 + 0.25 * factor) * a)


def test_slerp_nearly_parallel_tensors_keep_precision(make: Make, tmp_path: Path) -> None:
    """The angle is just large enough for slerp, and the tensor as large as a real matrix."""
    a = random(0, x=(300, 300))["x"]
    b = a + 0.04 * random(1, x=(300, 300))["x"]
    merged = run(tmp_path / "out", **slerp([make("a", {"x": a}), make("b", {"x": b})], 0.3))["x"]
    due = reference_slerp([a.double().numpy(), b.double().numpy()])
    np.testing.assert_allclose(merged.numpy(), due, rtol=2e-6, atol=1e-7)


# ---- the output folder ------------------------------------------------------------------------


def perturbed(story: Path, to: Path, sign: float, change: Callable[[Tensors], Any]) -> str:
    shutil.copytree(story, to, copy_function=shutil.copyfile)
    to.chmod(0o755)
    tensors = load_file(to / FILE)
    noise = random(5, **{name: tuple(tensor.shape) for name, tensor in tensors.items()})
    tensors = {name: t + sign * t.std() * noise[name] for name, t in tensors.items()}
    change(tensors)
    save_file(tensors, to / FILE)
    return str(to)


def tie(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def greedy(folder: Path) -> bool:
    """Return whether the model in the folder generates the reference tokens."""
    driver = Driver(folder)
    cases = json.loads((folder.parent / "expected.json").read_text())["cases"][:2]
    due = {driver.submit(case["prompt_ids"], 60): case["ids"][:60] for case in cases}
    driver.run()
    return all(driver.tokens(request) == ids for request, ids in due.items())


@pytest.mark.parametrize("stored", ["in neither", "in one", "in both"])
def test_merge_story_checkpoints_generates_reference_tokens(tmp_path: Path, stored: str) -> None:
    """The mean of two checkpoints with opposite noise is the original checkpoint.

    A copy of the tied LM head, which some files hold, stays tied or is dropped.
    """
    story = located(LLAMA)
    shutil.copyfile(story / "expected.json", tmp_path / "expected.json")
    copies = [tie if stored == "in both" else len, tie if stored != "in neither" else len]
    folders = [
        perturbed(story, tmp_path / str(i), sign, copies[i]) for i, sign in enumerate((1, -1))
    ]
    merged = run(tmp_path / "out", **linear(folders))
    assert ("lm_head.weight" in merged) == (stored == "in both")
    if stored == "in both":
        assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    assert not greedy(tmp_path / "0")
    assert greedy(tmp_path / "out")


def test_merge_keeps_dtypes_files_and_order_of_base(make: Make, tmp_path: Path) -> None:
    first = {"z": torch.ones(4), "a": torch.ones(3).half(), "m": torch.ones(2).bfloat16()}
    base = Path(make("base", {}))
    (base / FILE).unlink()
    names = ["model-1.safetensors", "model-2.safetensors"]
    save_file({"z": first["z"], "m": first["m"]}, base / names[0])
    save_file({"a": first["a"]}, base / names[1])
    where = {"z": names[0], "m": names[0], "a": names[1]}
    (base / INDEX).write_text(json.dumps({"weight_map": where}))
    other = make("other", {name: 3 * tensor.float() for name, tensor in first.items()})
    merged = run(tmp_path / "out", **linear([str(base), other]))
    assert {name: (t.dtype, t[0].item()) for name, t in merged.items()} == {
        name: (t.dtype, 2.0) for name, t in first.items()
    }
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index == {"metadata": {"total_size": 16 + 6 + 4}, "weight_map": where}
    for name in names:
        ours, its = (list(safetensors_header(folder / name)) for folder in (tmp_path / "out", base))
        assert ours == its  # ordered by data offset, ["z", "m"], not by name
    assert weight_files(tmp_path / "out") == [tmp_path / "out" / name for name in names]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_merge_dtype_in_recipe_sets_tensors_and_config(
    make: Make, tmp_path: Path, key: str
) -> None:
    folders = [make(name, random(seed), **{key: "float32"}) for seed, name in enumerate("ab")]
    merged = run(tmp_path / "out", **linear(folders), dtype="bfloat16")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == "bfloat16"


def test_merge_non_float_tensors_must_be_equal(make: Make, tmp_path: Path) -> None:
    mask = torch.ones(3, dtype=torch.bool)
    folders = [make(name, {"x": torch.ones(2), "mask": mask}) for name in "ab"]
    assert run(tmp_path / "out", **linear(folders))["mask"].equal(mask)
    folders.append(make("c", {"x": torch.ones(2), "mask": ~mask}))
    said = refusal(tmp_path / "out2", linear(folders))
    assert f"mask differs between {folders[0]}/{FILE} (BOOL) and {folders[2]}/{FILE} (BOOL)" in said


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_merge_refuses_quantized_checkpoints(make: Make, tmp_path: Path, key: str) -> None:
    folders = [make("a", random(0)), make("b", random(1), **{key: {"quant_method": "gptq"}})]
    said = refusal(tmp_path / "out", linear(folders))
    assert f"{folders[1]} has {key} in config.json: quantised checkpoints cannot be" in said


def test_merge_output_folder_is_complete_and_records_inputs(make: Make, tmp_path: Path) -> None:
    folders = [make("a", random(0), rope_theta=1e4), make("b", random(1), rope_theta=1e6)]
    base = Path(folders[1])
    pooling = base / "1_Pooling" / "config.json"
    pooling.parent.mkdir()
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "modules.json"]
    kept += ["preprocessor_config.json", "processor_config.json"]
    left = ["modeling_evil.py", "pytorch_model.bin", "optimizer.pt", "README.md", "model.gguf"]
    for name in [*kept, *left]:
        (base / name).write_text(name)
    pooling.write_text("{}")
    recipe = linear(folders) | {"base_model": folders[1]}
    notes = merge(parse(recipe), tmp_path / "out", lambda share: None)
    files = {f.relative_to(tmp_path / "out") for f in (tmp_path / "out").rglob("*") if f.is_file()}
    names = {*kept, "config.json", FILE, RECORD, "1_Pooling/config.json"}
    assert {str(file) for file in files} == names
    assert (tmp_path / "out" / "config.json").read_text() == (base / "config.json").read_text()
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["recipe"] == recipe | {"dtype": None, "parameters": {"normalize": True}}
    size = Path(folders[0], FILE).stat().st_size
    assert [entry["folder"] for entry in record["inputs"]] == folders
    assert record["inputs"][0]["bytes"] == {FILE: size}
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert notes == record["differences"]
    assert notes == [f"rope_theta stays 1000000.0; in {folders[0]} it is 10000.0"]


# ---- memory -----------------------------------------------------------------------------------

# Not getrusage: a process inherits the peak of its parent.
MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from engine.offline.merge.merge import merge
from engine.offline.merge.recipe import parse
torch.set_num_threads(1)
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = status("VmRSS")
merge(parse(json.loads(sys.argv[2])), Path(sys.argv[1]), lambda share: None)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", ["many", pytest.param("one", marks=pytest.mark.slow)])
def test_merge_memory_is_within_two_tensors_and_200_mb(
    kind: str, make: Make, tmp_path: Path
) -> None:
    """The limit is twice the largest tensor plus 200 MB.

    In memory, the first case would need at least 3 x 100 MB, and the second 2 x 300 MB in fp32.
    """
    if kind == "many":
        folder = make("m", {f"layer{i}": torch.ones(1 << 20) for i in range(25)})
        document = METHODS["ema"][1]([folder, folder, folder])
        largest = 4 << 20
    else:
        tensors = {"x": torch.ones(75 << 20, dtype=torch.bfloat16)}
        document = slerp([make("a", tensors), make("b", tensors)], 0.5)
        largest = 150 << 20
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "out"), json.dumps(document)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) < 2 * largest + 200e6
    shutil.rmtree(tmp_path)  # pytest would keep hundreds of megabytes
