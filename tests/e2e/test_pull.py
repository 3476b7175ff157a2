"""`penstock pull` and `serve ORG/NAME` against a local hub, without any other network access."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from server import exit_codes
from server.cli.model_source import resolve_model
from server.config import ServerConfig
from tests.support import web
from tests.support.hub import COMMIT, Hub, serving_hub
from tests.support.process import INTERRUPTIBLE, ROOT, eventually
from tests.support.serve import Case, serving

NAME = "tales/stories-260k"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
CONFIG, TOKENIZER = (
    (ROOT / "engine/demo/model" / name).read_bytes() for name in ("config.json", "tokenizer.json")
)
LEFT = ("pytorch_model.bin", "model.pt", "modeling_tale.py", "README.md", "onnx/model.safetensors")


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A repository with a megabyte of random bytes as weights."""
    files = {name: name.encode() for name in (*LEFT, *SMALL)}
    files |= {**dict.fromkeys(SMALL, b"{}"), "config.json": CONFIG, "tokenizer.json": TOKENIZER}
    with serving_hub(Hub(NAME, {**files, WEIGHTS: random.Random(0).randbytes(1 << 20)})) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf"


def environ(hub: Hub | str, home: Path, **more: str) -> dict[str, str]:
    url = hub if isinstance(hub, str) else hub.url
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PENSTOCK_"))}
    return {**clean, "HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **more}


def start(hub: Hub | str, home: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    command = [*INTERRUPTIBLE, sys.executable, "-m", "server", "pull", *(arguments or (NAME,))]
    pipe, env = subprocess.PIPE, environ(hub, home, **more)
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def pull(hub: Hub | str, home: Path, *arguments: str, **more: str) -> tuple[int, str, str]:
    process = start(hub, home, *arguments, **more)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def pulled(hub: Hub, home: Path, *arguments: str, **more: str) -> Path:
    status, out, err = pull(hub, home, *arguments, **more)
    assert status == 0, err
    assert COMMIT in err
    folder = Path(out.strip())
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    return folder


def test_pull_downloads_only_the_files_that_are_read(hub: Hub, home: Path) -> None:
    folder = pulled(hub, home)
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if not f.is_dir()}
    assert names == {*SMALL, WEIGHTS}
    assert not [
        seen for seen in hub.seen if seen.file in {name.split("/")[-1] for name in LEFT[:4]}
    ]
    assert folder.name == COMMIT
    assert {path for seen in hub.seen if NAME not in (path := seen.path)} == set(), "telemetry"
    assert (folder.parents[1] / "refs" / "main").read_text() == COMMIT
    hub.seen.clear()
    assert pulled(hub, home) == folder
    assert [seen.method for seen in hub.seen] == ["GET"], "only the look-up"


@pytest.mark.slow
def test_pull_with_revision_keeps_the_commit(hub: Hub, home: Path) -> None:
    hub.revisions = ("v1/final", COMMIT)
    folder = pulled(hub, home, NAME, "--revision", "v1/final")
    assert (folder.parents[1] / "refs" / "v1" / "final").read_text() == COMMIT
    asked = len(hub.seen)
    assert pulled(hub, home, NAME, "--revision", COMMIT) == folder
    assert len(hub.seen) == asked, "a commit cannot move, so a pod can start without the hub"
    (folder / WEIGHTS).unlink()
    assert pulled(hub, home, NAME, "--revision", COMMIT) == folder
    status, _, err = pull(hub, home)
    assert (status, "no revision" in err) == (exit_codes.BAD_CONFIG, True)


@pytest.mark.slow
def test_pull_with_index_downloads_only_its_shards(hub: Hub, home: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    del hub.files[WEIGHTS]
    hub.files |= {shard: shard.encode() for shard in shards}
    hub.files |= {"consolidated.safetensors": b"twice", "1_Pooling/config.json": b"{}"}
    hub.files[INDEX] = b'{"weight_map": {"a": "%s", "b": "%s"}}' % tuple(map(str.encode, shards))
    status, out, err = pull(hub, home)
    assert status == 0, err
    folder = Path(out.strip())
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if not f.is_dir()}
    assert names == {*SMALL, *shards, INDEX, "1_Pooling/config.json"}


@pytest.mark.slow
def test_pull_with_copies_in_other_formats_downloads_the_file_of_transformers(
    hub: Hub, home: Path
) -> None:
    others = ("consolidated", "adapter_model", "model.fp16", "model-00001-of-00002")
    hub.files |= {f"{name}.safetensors": b"another" for name in others}
    hub.files |= {INDEX: b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'}
    template = "additional_chat_templates/tool_use.jinja"
    hub.files |= {template: b"{{ tools }}"}
    folder = pulled(hub, home)
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if not f.is_dir()}
    assert names == {*SMALL, WEIGHTS, template}


@pytest.mark.slow
def test_pull_of_a_gguf_file_downloads_its_parts_and_one_image_encoder(
    hub: Hub, home: Path
) -> None:
    parts = [f"q4/model-0000{number}-of-00002.gguf" for number in (1, 2)]
    encoder = "q4/mmproj-BF16.gguf"
    others = ("model-f16.gguf", "mmproj-F16.gguf", "q4/mmproj-F32.gguf", "q4/mmproj-F16.gguf")
    hub.files |= {name: name.encode() for name in (*parts, encoder, *others)}
    status, out, err = pull(hub, home, NAME, "--gguf-file", parts[0])
    assert status == 0, err
    file = Path(out.strip())
    assert file.read_bytes() == parts[0].encode()
    folder = file.parents[1]
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if not f.is_dir()}
    assert names == {*parts, encoder}
    status, _, err = pull(hub, home, NAME, "--gguf-file", "none.gguf")
    assert status == exit_codes.BAD_CONFIG
    assert "choose one with --gguf-file: model-f16.gguf, q4/model-00001-of-00002.gguf" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "resets",
    [pytest.param(False, id="closed", marks=pytest.mark.slow), pytest.param(True, id="reset")],
)
def test_pull_after_dropped_connections_resumes(hub: Hub, home: Path, resets: bool) -> None:
    hub.drops, hub.resets = [300_000, 0, 200_000], resets
    pulled(hub, home)
    ranges = [seen.range for seen in hub.requests("GET", WEIGHTS)]
    assert ranges[0] is None
    starts = [int(str(r).removeprefix("bytes=").removesuffix("-")) for r in ranges[1:]]
    # A reset may arrive before bytes that were sent earlier.
    assert starts == [300_000, 300_000, 500_000] or (resets and 0 < starts[-1] <= 500_000)


@pytest.mark.slow
def test_pull_from_server_without_range_support_restarts(hub: Hub, home: Path) -> None:
    hub.drops, hub.ignores_range = [300_000], True
    pulled(hub, home)


def largest(folder: Path) -> int:
    """Return the bytes of the largest unfinished file. Small files may vanish during the search."""
    sizes = [0]
    for file in folder.glob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_pull_after_a_killed_pull_resumes(hub: Hub, home: Path, number: signal.Signals) -> None:
    hub.drops, hub.stalls = [300_000], True
    process = start(hub, home)
    try:
        part = home / "hub" / "models--tales--stories-260k" / "blobs"
        eventually(lambda: largest(part) > 100_000, "some bytes are on the disk", 30)
        process.send_signal(number)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "the next pull resumes" in err
    assert "Traceback" not in err
    hub.seen.clear()
    pulled(hub, home)
    [seen] = hub.requests("GET", WEIGHTS)
    assert int(str(seen.range).removeprefix("bytes=").removesuffix("-")) > 100_000
    assert not list(part.glob("*.incomplete"))


@pytest.mark.slow
def test_pull_with_wrong_hash_deletes_the_file(hub: Hub, home: Path) -> None:
    blobs = home / "hub" / "models--tales--stories-260k" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hashlib.sha256(hub.files[WEIGHTS]).hexdigest()}.incomplete"
    part.write_bytes(b"not the beginning")
    status, _, err = pull(hub, home)
    assert (status, f"{WEIGHTS} of {NAME} has the wrong SHA-256" in err) == (
        exit_codes.BAD_CONFIG,
        True,
    )
    assert not part.exists()
    pulled(hub, home)


@pytest.mark.slow
def test_pull_during_another_pull_of_the_file_fails(hub: Hub, home: Path) -> None:
    blobs = home / "hub" / "models--tales--stories-260k" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / f"{hashlib.sha256(hub.files[WEIGHTS]).hexdigest()}.incomplete").open(
        "wb"
    ) as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        status, _, err = pull(hub, home)
    assert (status, f"Another process is pulling {NAME}" in err) == (exit_codes.BAD_CONFIG, True)


@pytest.mark.slow
def test_pull_from_cdn_sends_the_token_only_to_the_hub(hub: Hub, home: Path) -> None:
    hub.cdn = hub.gated = True
    pulled(hub, home, HF_TOKEN="hf_secret")
    [elsewhere] = [seen for seen in hub.seen if seen.host.startswith("localhost")]
    assert elsewhere.token is None
    assert {seen.token for seen in hub.seen if seen is not elsewhere} == {"Bearer hf_secret"}


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def config(**changes: Any) -> dict[str, Any]:
    """Return fields of a Hub whose config.json is the demo model's with `changes`."""
    files = {"config.json": json.dumps({**json.loads(CONFIG), **changes}).encode()}
    return {"files": {WEIGHTS: b"", "tokenizer.json": TOKENIZER, **files}}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "not found": ({"refuses": "RepoNotFound"}, {}, "neither a local folder nor a public model at"),
    "gated": ({"gated": True}, {}, f"{NAME} is gated: accept its conditions at"),
    "token": ({"refuses": "Unauthorized"}, {"HF_TOKEN": "hf_x"}, "check HF_TOKEN, or unset it"),
    "hub is down": ({"refuses": "Unavailable"}, {}, f"returned 503 for {NAME}"),
    "no hub": ({"refuses": "NoHub"}, {}, f"{NAME} is no local folder, and http://127.0.0.1:"),
    "offline": ({}, {"HF_HUB_OFFLINE": "1"}, f"{NAME} is not a local folder and not complete in"),
    "full disk": ({"sizes": {WEIGHTS: 10**18}}, {}, f"{NAME} needs 1.0 EB more in "),
    "pickles": (
        {"files": {"pytorch_model.bin": b"", "config.json": b"{}"}},
        {},
        "no model.safetensors, no model.safetensors.index.json",
    ),
    "gguf": ({"files": {"q4.gguf": b""}}, {}, f"{NAME} has GGUF files; choose one with --gguf-"),
    "no config": ({"files": {WEIGHTS: b""}}, {}, "no config.json"),
    "architecture": (
        config(architectures=["FalconForCausalLM"]),
        {},
        "FalconForCausalLM is not serv",
    ),
    "quantised": (config(quantization_config={"quant_method": "hqq"}), {}, "quantised weights"),
    "shard": (
        {"files": {INDEX: b'{"weight_map": {"a": "x"}}', "config.json": b"{}"}},
        {},
        "lists x, but the repository",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.variants(1)
def test_pull_that_fails_prints_one_line(hub: Hub, home: Path, case: str) -> None:
    fields, env, said = REFUSED[case]
    for name, value in fields.items():
        setattr(hub, name, value)
    status, out, err = pull(hub, home, **env)
    assert (status, out) == (exit_codes.BAD_CONFIG, "")
    assert said in err
    after_look_up = ("architecture", "quantised")
    assert len(err.splitlines()) == 1 + (case in after_look_up)
    assert not hub.requests("GET", WEIGHTS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((NAME,), f"{NAME} is not a local folder, and http"),
        (("a/b/c",), "'a/b/c' is not a valid model name"),
    ],
)
@pytest.mark.variants(1)
def test_pull_without_a_hub_prints_one_line(
    home: Path, arguments: tuple[str, ...], said: str
) -> None:
    status, _, err = pull(closed_port(), home, *arguments)
    assert status == exit_codes.BAD_CONFIG
    assert said in err
    assert len(err.splitlines()) == 1


# ---- serve ------------------------------------------------------------------------------------

NO_NETWORK = """
import os, socket
def watch(of):
    def connect(self, address, *more):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ALLOWED:
            open(os.environ["NETWORK_LOG"], "a").write(repr(address) + "\\n")
            raise OSError("no network here")
        return of(self, address, *more)
    return connect
ALLOWED = ("127.0.0.1", "::1", "localhost")
socket.socket.connect = watch(socket.socket.connect)
socket.socket.connect_ex = watch(socket.socket.connect_ex)
"""


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """An environment that blocks connections to other machines and logs each attempt."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    return {
        "NETWORK_LOG": str(tmp_path / "network.log"),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
    }


def first_words(url: str, model: str, case: Case) -> bool:
    body = {"model": model, "prompt": case.prompt_ids, "max_tokens": 8, "temperature": 0}
    more = {"return_token_ids": True}
    answer = web.post(f"{url}/v1/completions", json=body | more, timeout=60).json()
    return bool(answer["choices"][0]["token_ids"] == case.ids[:8])


@pytest.mark.slow
def test_serve_cached_model_opens_no_connection(
    llama: Path, stories: list[Case], home: Path, watched: dict[str, str]
) -> None:
    files = {
        file.name: file.read_bytes() for file in llama.iterdir() if file.name != "expected.json"
    }
    with serving_hub(Hub(NAME, files)) as hub:
        env = environ(hub, home) | watched
        for turn in range(2):
            hub.seen.clear()
            with serving(NAME, "--dtype", "float32", env=env) as server:
                assert first_words(server.base_url, NAME, stories[0])
                assert (COMMIT in server.log.partition("listening")[0]) == (turn == 0)
            assert bool(hub.seen) == (turn == 0)
    assert not Path(watched["NETWORK_LOG"]).exists()


@pytest.mark.slow
def test_serve_demo_opens_no_connection(hub: Hub, home: Path, watched: dict[str, str]) -> None:
    with serving("demo", env=environ(hub, home) | watched) as server:
        answer = web.post(f"{server.base_url}/v1/completions", json={"prompt": "Hi"}, timeout=60)
        assert answer.status_code == 200
    assert hub.seen == []
    assert not Path(watched["NETWORK_LOG"]).exists()
    assert not home.exists()


def test_serve_prefers_a_local_folder_to_the_hub(hub: Hub, home: Path, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    answer = subprocess.run(
        [sys.executable, "-m", "server", "serve", NAME],
        cwd=tmp_path, env=environ(hub, home), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == exit_codes.BAD_CONFIG
    assert f"{tmp_path / NAME} has no config.json" in answer.stderr
    assert hub.seen == []


@pytest.mark.slow
def test_serve_plan_downloads_no_weights(hub: Hub, home: Path) -> None:
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        answer = subprocess.run(
            [sys.executable, "-m", "server", "serve", NAME, "--plan", "--device", "cpu"],
            cwd=ROOT, env=environ(hub, home, **more), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert "LlamaForCausalLM, 2,885,888 parameters" in answer.stdout
    assert len(hub.requests("GET", "config.json")) == 1
    assert not hub.requests("GET", WEIGHTS)
    pulled(hub, home)  # the folder without weights does not count as complete


def test_located_with_dummy_weights_skips_their_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The Ray deployment uses this function, too."""
    asked: list[bool] = []

    def locate(name: str, check: object, tell: object, weights: bool, file: object) -> Path:
        asked.append(weights)
        return tmp_path

    monkeypatch.setattr("server.cli.pull.locate", locate)
    for load_format in ("dummy", "safetensors"):
        _, config = resolve_model(ServerConfig(), EngineConfig(model=NAME, load_format=load_format))
        assert config.model == str(tmp_path)
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (NAME, f"{NAME} is neither a local folder nor a public model"),
        ("a/b--c", "'a/b--c' is not a valid model name"),
    ],
)
@pytest.mark.variants(1)
def test_serve_with_failing_pull_prints_the_reason(
    hub: Hub, home: Path, name: str, said: str
) -> None:
    hub.refuses = "RepoNotFound"
    answer = subprocess.run(
        [sys.executable, "-m", "server", "serve", name],
        cwd=ROOT, env=environ(hub, home), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == exit_codes.BAD_CONFIG
    assert said in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        (
            config(architectures=["FalconForCausalLM"]),
            (),
            "Architecture FalconForCausalLM is not serv",
        ),
        (config(vocab_size=10**9, hidden_size=8192), (), "GiB, but the machine has "),
        (config(), ("--max-model-len", "65536"), "more than the 16384 positions of this model"),
        ({"files": {WEIGHTS: b"", "config.json": CONFIG}}, (), "has no tokenizer.json"),
    ],
    ids=["architecture", "memory", "flag", "tokenizer"],
)
def test_serve_with_unservable_model_downloads_no_weights(
    hub: Hub, home: Path, files: dict[str, Any], arguments: tuple[str, ...], said: str
) -> None:
    hub.files = files["files"]
    for _ in range(2):  # the partial download does not count as complete
        answer = subprocess.run(
            [sys.executable, "-m", "server", "serve", NAME, "--device", "cpu", *arguments],
            cwd=ROOT, env=environ(hub, home), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == exit_codes.BAD_CONFIG
        look_up, refusal = answer.stderr.splitlines()
        assert COMMIT in look_up
        assert said in refusal
    assert hub.requests("GET", "config.json")
    assert not hub.requests("GET", WEIGHTS)


@pytest.mark.slow
def test_serve_with_json_logs_writes_records_of_a_pull(hub: Hub, home: Path) -> None:
    """The downloaded weights are not in safetensors format."""
    for offline, levels in (("1", ["error"]), ("0", ["info", "error"])):
        answer = subprocess.run(
            [sys.executable, "-m", "server", "serve", NAME, "--log-format", "json"], cwd=ROOT,
            env=environ(hub, home, HF_HUB_OFFLINE=offline),
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert answer.returncode == exit_codes.BAD_CONFIG
        records = [json.loads(line) for line in answer.stderr.splitlines()]
        assert [record["level"] for record in records] == levels
    assert "not a readable safetensors file" in records[-1]["event"]


def test_network_watch_logs_a_connection(watched: dict[str, str], tmp_path: Path) -> None:
    """Without this check, the tests above could pass although the watch does not work."""
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    env = {**os.environ, **watched}
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)
    assert "192.0.2.1" in Path(watched["NETWORK_LOG"]).read_text()
