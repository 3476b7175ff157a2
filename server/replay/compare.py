"""Run a comparison in a process of its own, and collect what it reports."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.folder import model_folder
from engine.client.module_command import python_module
from engine.client.subprocess import exit_message
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.protocol.compare import Answered, Compared, Comparison, Failed, Report, Working
from server.replay.compare_prompts import Messages, Reader, have_same_tokens, shown
from server.replay.verify import first_difference
from server.text.detokenizer import Detokenizer, token_texts
from server.text.tokenizer import Tokenizer

FORMAT = "penstock-comparison"
BLOCK, TOGETHER = 64, 8  # tokens of a KV block; answers that are written at the same time
REPORTS = msgspec.json.Decoder(Report)


class Settings(msgspec.Struct, frozen=True):
    """How the answers are written."""

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "auto"  # of models that name none
    device: str = "auto"


def compare(
    models: list[EngineConfig],
    prompts: list[str | Messages],
    settings: Settings,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Return the document of a comparison. Raises ConfigError; `tell` gets the progress."""
    folders = [model_folder(config.model) for config in models]
    readers = [Reader(config.model, folder) for config, folder in zip(models, folders, strict=True)]
    try:
        same = have_same_tokens(readers)
        ids = [[reader.ids(prompt) for prompt in prompts] for reader in readers]
    finally:
        for reader in readers:
            reader.close()
    if same and any(other != ids[0] for other in ids[1:]):  # another chat template
        tell("The chat templates differ; every model reads the first one's prompts.")
        ids = [ids[0]] * len(models)
    longest = max(len(one) for every in ids for one in every) + settings.max_tokens
    blocks = TOGETHER * -(-longest // BLOCK) + 1
    asked = Comparison(
        models=[_config(config, folder, longest, blocks, settings)
                for config, folder in zip(models, folders, strict=True)],
        prompts=ids,
        end_ids=[sorted(reader.tokenizer.eos_token_ids) for reader in readers],
        same_tokens=same,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
    )  # fmt: skip
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": 1,
        "models": [config.model for config in models],
        "same_tokens": same,
        "settings": msgspec.to_builtins(settings),
        "prompts": [{"prompt": shown(one), "answers": [], "distances": []} for one in prompts],
    }
    tokenizers = [reader.tokenizer for reader in readers]
    for report in _reports(asked):
        if isinstance(report, Working):
            tell(report.text)
        elif isinstance(report, Failed):
            raise ConfigError(report.text)
        else:
            _add(document, report, tokenizers)
    return document


def _config(
    config: EngineConfig, folder: Path, longest: int, blocks: int, settings: Settings
) -> EngineConfig:
    return msgspec.structs.replace(
        config,
        model=str(folder),
        dtype=settings.dtype if config.dtype == "auto" else config.dtype,
        device=settings.device,
        max_model_len=longest,
        max_num_seqs=TOGETHER,
        block_size=BLOCK,
        num_gpu_blocks_override=blocks,
        enforce_eager=True,
        enable_prefix_caching=False,
    )


def _reports(asked: Comparison) -> Any:
    """Yield the reports of the process; it ends with this generator."""
    command = python_module("engine.offline.compare.command")
    pipe = subprocess.PIPE
    # A file, because nothing reads the errors before the end: a pipe would fill and block.
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which `wait` reports
                process.stdin.write(msgspec.json.encode(asked))
                process.stdin.close()
            for line in process.stdout:
                yield REPORTS.decode(line)
            if process.wait() not in (0, 2):
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else exit_message(process.returncode)
                raise ConfigError(f"The comparison failed: {reason}")
        finally:
            process.kill()


def _add(
    document: dict[str, Any], report: Answered | Compared, tokenizers: list[Tokenizer]
) -> None:
    """Add a report to the document."""
    entry = document["prompts"][report.prompt]
    if isinstance(report, Answered):
        detokenizer = Detokenizer(
            tokenizers[report.model], skip_special_tokens=False, continues=True
        )
        pieces = token_texts(detokenizer, report.tokens)
        answer = {"text": "".join(pieces), "tokens": report.tokens, "pieces": pieces}
        first = entry["answers"][0]["tokens"] if entry["answers"] else report.tokens
        is_equal = first == report.tokens or not document["same_tokens"]
        parts = None if is_equal else first_difference(first, report.tokens)
        entry["answers"].append({**answer, "finish": report.finish, "parts_at": parts})
        return
    tokenizer = tokenizers[0]
    rows = [
        {**msgspec.to_builtins(one), "best": tokenizer.token_text(one.best)}
        for one in report.tokens
    ]
    entry["distances"].append({"model": report.model, "writer": report.writer, "tokens": rows})
