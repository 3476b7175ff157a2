"""The command `penstock`: its start-up cost, its output and its exit status."""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from engine.checkpoint.folder import DEMO_FOLDERS, model_folder
from server.app import api_document
from server.settings import flags_page, settings
from tests.support import command_line, web
from tests.support.process import INTERRUPTIBLE, START_S, STOP_S, eventually

ROOT = Path(__file__).resolve().parents[3]
# They import torch.
PLAN = pytest.param(["serve", "--plan"], marks=pytest.mark.slow, id="serve --plan")
DOCTOR = pytest.param(["doctor"], marks=pytest.mark.slow, id="doctor")


def process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process, which may replace itself by another and import torch."""
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", **environ},
    )


def penstock(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return command_line.penstock(*arguments, **{"COLUMNS": "200"} | environ)


def test_serve_help_is_quick_and_imports_no_heavy_module() -> None:
    code = (
        "import sys; from server.cli.main import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'tokenizers', 'yaml', 'httpx2'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
        "import time; print(time.process_time())"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded, seconds = answer.stdout.splitlines()[-2:]
    assert loaded == "loaded: []", answer.stderr
    assert float(seconds) < 5


@pytest.mark.parametrize("columns", ["80", "200"])
def test_serve_help_shows_every_setting_with_its_variable(columns: str) -> None:
    text = penstock("serve", "--help", COLUMNS=columns).stdout
    for setting in settings():
        assert f"  {setting.flag} " in text
        assert f"({setting.variable})" in text
    words = " ".join(text.split())
    assert "needs the extra [otel]. (default: false)" in words
    for panel in ("Model", "KV cache and scheduling", "HTTP", "Logging", "Exit statuses"):
        assert f"\n{panel}:\n" in text
    assert "--plan  " in text, "--plan takes no value"
    assert "--help  " in text


@pytest.mark.parametrize("arguments", [(), ("bench",), ("import",)])
def test_help_at_80_columns_truncates_no_command(arguments: tuple[str, ...]) -> None:
    text = penstock(*arguments, "--help", COLUMNS="80").stdout
    assert "Commands:" in text
    assert "..." not in text.partition("Commands:")[2]


def test_version_option_prints_the_version() -> None:
    assert penstock("--version").stdout.startswith("penstock ")


def test_flags_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_page(), "run `penstock flags > docs/flags.md`"
    assert penstock("flags").stdout == page


def test_api_command_prints_the_document() -> None:
    assert json.loads(process("api").stdout) == api_document()


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["serve", "--port", "none"], {}, "--port: 'none' is not a whole number"),
        (["serve"], {"PENSTOCK_DTYPE": "int3"}, "PENSTOCK_DTYPE: 'int3' is not one of auto"),
        (["serve", "--config", "/nowhere.yaml"], {}, "/nowhere.yaml"),
        (["serve", "/no/such/model"], {}, "No model folder at /no/such/model"),
        (["serve", ""], {}, "'' is not a model name"),
        (["serve"], {"PENSTOCK_MODEL": "https://example.org/a/b"}, "ORG/NAME on huggingface.co"),
        (["serve", __file__], {}, "test_main.py is a file; give its folder"),
        (["serve", "~nobody-of-that-name/x"], {}, "~nobody-of-that-name/x is not a usable path"),
        (["serve", "x" * 300], {}, "Cannot access the model folder: "),
        (["serve", "a", "--model", "b"], {}, "The model was given twice"),
        (["serve", "--no-such-flag"], {}, "--no-such-flag"),
        (["quantize", "demo", "x", "--quantization", "int3"], {}, "'int3' is not one of 'int8'"),
        (["quantize", "/no/such/model", "x", "--quantization=int8"], {}, "No model folder at /no"),
    ],
)
def test_command_with_invalid_input_exits_with_2(
    arguments: list[str], environ: dict[str, str], words: str
) -> None:
    check_refused(penstock(*arguments, **environ), words)


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["serve", "--port", "none"], {}, "--port: 'none' is not a whole number"),
        # The library reads these variables when it is imported.
        (["pull", "a/b"], {"HF_HUB_DOWNLOAD_TIMEOUT": "x"}, "variable HF_* is not valid"),
        (["serve", "a/b"], {"HF_HUB_DOWNLOAD_TIMEOUT": "x"}, "variable HF_* is not valid"),
        (["pull", "a/b"], {"HF_TOKEN": "k\u00e9y"}, "HF_TOKEN has characters that are not"),
        *(
            pytest.param(arguments, {}, words, marks=pytest.mark.slow)  # torch is imported first
            for start in (
                ["import", "nanochat"],
                ["merge", "demo", "demo", "--method=linear", "-o"],
            )
            for path, words in (
                ("~nobody-of-that-name/x", "usable path"),
                ("x" * 300, "name too long"),
            )
            for arguments in ([*start, path],)
        ),
    ],
)
@pytest.mark.variants(2)
def test_process_with_invalid_input_exits_with_2(
    arguments: list[str], environ: dict[str, str], words: str
) -> None:
    check_refused(process(*arguments, **environ), words)


def check_refused(answer: subprocess.CompletedProcess[str], words: str) -> None:
    assert answer.returncode == 2
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("models: &a [*a]", "not valid: Circular"),
        ("2001-01-01: 1", "not valid: keys must be"),
        (f"models: [{{model: {'m' * 140_000}}}]", "Argument list too long"),
    ],
    ids=lambda value: value[:20],
)
def test_merge_with_unserialisable_recipe_exits_with_2(
    tmp_path: Path, recipe: str, words: str
) -> None:
    (tmp_path / "r.yaml").write_text(recipe)
    answer = process("merge", "--recipe", f"{tmp_path}/r.yaml", "-o", f"{tmp_path}/x")
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert words in answer.stderr


@pytest.mark.parametrize("name", DEMO_FOLDERS)
def test_pull_demo_model_prints_its_folder(name: str) -> None:
    answer = penstock("pull", name)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert Path(answer.stdout.strip()) == model_folder(name)


def test_serve_with_unknown_variable_exits_with_2_and_a_hint() -> None:
    answer = penstock("serve", "/none", PENSTOCK_POTR="1")
    assert answer.returncode == 2
    assert "Did you mean PENSTOCK_PORT?" in answer.stderr


def test_serve_warnings_go_to_stderr_and_hide_the_secret() -> None:
    answer = penstock("serve", "/none", "--api-key", "s3cret")
    assert "--api-key stays in the shell" in answer.stderr
    assert "s3cret" not in answer.stderr
    assert answer.stdout == ""


def test_serve_with_circular_symlink_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    answer = penstock("serve", f"{tmp_path}/a")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert f"{tmp_path}/a" in answer.stderr


def without(redirections: str, *arguments: str) -> list[str]:
    """Return a command that runs `penstock` after closing standard streams."""
    run = [sys.executable, "-m", "server", *arguments]
    return ["sh", "-c", f'exec "$@" {redirections}', "sh", *run]


@pytest.mark.slow
@pytest.mark.parametrize("redirections", ["2>&-", "<&- >&- 2>&-"])
def test_serve_with_closed_standard_streams_becomes_ready(redirections: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    command = without(redirections, "serve", "--port", port, "--threads", "1")
    server = subprocess.Popen(command, cwd=ROOT, env={"PATH": "/usr/bin:/bin"})

    def ready() -> bool:
        assert server.poll() is None, "the server has exited"
        try:
            return web.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        except httpx2.TransportError:
            return False

    try:
        eventually(ready, "the server is ready", START_S)
        server.terminate()
        assert server.wait(STOP_S) == 0
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "redirections", ["<&-", *(pytest.param(one, marks=pytest.mark.slow) for one in (">&-", "2>&-"))]
)
def test_serve_plan_with_a_closed_stream_exits_with_0(redirections: str) -> None:
    command = without(redirections, "serve", "--plan", "--port", "0")
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_standard_streams_with_python_u_stay_unbuffered() -> None:
    """Our images set PYTHONUNBUFFERED, so that a killed process has written all its lines."""
    code = (
        "import os, sys\n"
        "from server.cli.clean_exit import standard_streams\n"
        "with standard_streams():\n"
        "    print('out')\n"
        "    print('err', file=sys.stderr)\n"
        "    os._exit(0)"
    )
    command = [sys.executable, "-u", "-c", code]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (answer.stdout, answer.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["bench", "--help"], ["flags"], DOCTOR, PLAN],
    ids=" ".join,
)
@pytest.mark.variants(1)
def test_command_with_stdout_on_a_full_disk_fails_in_one_line(arguments: list[str]) -> None:
    command = without(">/dev/full", *arguments)
    answer = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    said = "penstock: Cannot write to stdout: No space left on device.\n"
    assert (answer.returncode, answer.stderr) == (1, said)


@pytest.mark.slow
def test_command_with_stderr_on_a_full_disk_keeps_its_status() -> None:
    command = without("2>/dev/full", "serve", "--plan", "--max-model-len", "99999")
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 2


def test_flags_with_non_blocking_stdout_waits_for_the_reader() -> None:
    """Node.js leaves a terminal that it shares in non-blocking mode."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    with subprocess.Popen(
        [sys.executable, "-m", "server", "flags"], cwd=ROOT, stdout=writer
    ) as run:
        os.close(writer)
        eventually(lambda: select.select([reader], [], [], 0)[0], "output has begun", START_S)
        time.sleep(0.5)  # until the pipe is full
        with open(reader, encoding="utf-8") as page:
            assert page.read().strip() == flags_page().strip()
    assert run.returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["flags"], PLAN], ids=" ".join)
def test_command_with_closed_pipe_exits_silently(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "server", *arguments]
    with open(writer, "wb") as gone:
        answer = subprocess.run(command, cwd=ROOT, stdout=gone, stderr=subprocess.PIPE, timeout=60)
    assert (answer.returncode, answer.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["flags"]),
        ("sitecustomize", ["serve", "--plan"]),
        ("torch", ["serve", "--plan"]),
        ("torch", ["import", "nanochat", "."]),
        ("torch", ["merge", "demo", "demo", "--method=linear", "-o", "x"]),
    ],
)
@pytest.mark.variants(2)
def test_ctrl_c_during_imports_exits_silently(
    tmp_path: Path, module: str, arguments: list[str]
) -> None:
    """`sitecustomize` is imported before our first line; here it acts in the second process."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal, sys\n"
        f"if {module != 'sitecustomize'} or 'server.cli.clean_exit' in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    command = [*INTERRUPTIBLE, sys.executable, "-m", "server", *arguments]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, env=env, timeout=60)
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, b"", b"")
