"""The load progress and the start-up banner that `penstock serve` writes to stderr."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI
from rich.filesize import decimal

from engine.checkpoint.folder import notes_of
from engine.checkpoint.sentence import SentenceConfig
from engine.config import EngineConfig
from engine.device.cache import cache_folder, cache_problem, triton_folder
from engine.protocol.ready import BATCH_VARIANCE, Progress, Ready
from server.cli.console import say
from server.config import ServerConfig
from server.http.addresses import address_of, is_loopback
from server.http.api_keys import keys_of
from server.state import AppState
from server.text.answers import Answers
from server.text.chat_template import ChatTemplate

# By Answers.source.
CALL_SOURCES = {
    "flag": "from --tool-call-parser",
    "response_template": "from the checkpoint's response_template",
    "table": "found from the chat template",
    "template": "inferred from the chat template",
}
UNKNOWN_KEY = "KEY"  # placeholder in the curl line for a key that the shell cannot look up


@contextlib.contextmanager
def load_progress(tell: Callable[[str], None]) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a Progress: a bar on a terminal, else a line per new stage."""
    if tell is not say or not sys.stderr.isatty():
        stages: set[str] = set()

        def line(progress: Progress) -> None:
            if progress.stage not in stages:
                stages.add(progress.stage)
                tell(f"penstock: {progress.stage}")

        yield line
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda seen: bars.update(task, description=seen.stage, completed=seen.fraction)


def base_url(host: str, port: int) -> str:
    """Return a URL that works on this machine: loopback in place of a wildcard address."""
    address, host = address_of(host), host.strip("[]")
    if address is not None and address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def device(ready: Ready) -> str:
    """Return the device and its threads, and how many processes compute the model."""
    threads = f"{ready.threads} threads"
    if ready.tensor_parallel_size > 1:
        threads += f" in each of {ready.tensor_parallel_size} processes"
    return f"{ready.device}, {threads}"


def weights(ready: Ready) -> str:
    size = decimal(ready.weight_bytes)
    return f"{size} in {ready.quantization}" if ready.quantization else size


def kernels(ready: Ready, wanted: str) -> list[str]:
    """Return a line with what only a first start compiles, or with what is on on a GPU.

    `wanted` is --kernels.
    """
    if ready.compiled_kernels:
        seconds = f"{ready.compile_seconds:.1f} s"
        return [f"  kernels   {ready.compiled_kernels} compiled in {seconds}, once"]
    if ready.kernel_features is None:
        return []
    if ready.kernel_features:
        return [f"  kernels   optimised: {', '.join(ready.kernel_features)}"]
    why = "--kernels plain" if wanted == "plain" else "no optimisation was measured on this GPU"
    return [f"  kernels   plain: {why}"]


def banner(app: FastAPI, ready: Ready, port: int) -> str:
    """Return the facts of the loaded model and a curl command that works as printed."""
    state: AppState = app.state.penstock
    sentence: SentenceConfig = app.state.embedding.sentence
    config, engine = state.config, state.engine_config
    has_keys = bool(keys_of(app))
    access = "on" if has_keys else "off"
    key = shell_key(config, os.environ) if has_keys else ""
    url = base_url(config.host, port)
    lines = [
        f"penstock {importlib.metadata.version('penstock')} serves {state.names[0]}: "
        f"{ready.architecture}, {ready.parameters:,} parameters, {ready.dtype}",
        f"  device    {device(ready)}, {ready.attention_backend} attention",
        f"  weights   {weights(ready)}, loaded in {ready.load_seconds:.1f} s",
        *kernels(ready, engine.kernels),
        *(vectors(state, sentence, ready) if ready.kind == "encoder" else sequences(engine, ready)),
        *drafts(ready),
        *adapters(state, ready),
        *(answers(state.answers, state.template) if state.task == "generate" else []),
        *(system_messages(state.template) if state.task == "generate" else []),
        *memory(ready),
        f"  access    API key {access}",
        f"  API       {url}/v1   metrics {url}/metrics   docs {url}/docs",
        *(line(url) for line in state.banner_lines),
        f"  try       {curl(state, ready, url, key)}",
    ]
    if key == UNKNOWN_KEY:
        lines.append(f"            (replace {key} by one of your API keys)")
    lines += [*arithmetic(ready), *not_followed(state.tokenizer.not_followed)]
    lines += tokenizer_notes(state, ready)
    lines += [f"  note      {note}" for note in notes_of(state.folder)]
    lines += unsafe_caches(ready)
    if not is_loopback(config.host) and not has_keys:
        lines.append(
            f"  warning   listening on {config.host} without an API key: everyone who can reach "
            "this machine can use it; set --api-key-file"
        )
    return "\n".join(lines)


def unsafe_caches(ready: Ready) -> list[str]:
    """Return a note if compiled kernels are not kept, because others could change them."""
    folders: list[Path] = []
    if ready.device != "cpu":
        folders += filter(None, [triton_folder(os.environ)])
    elif folder := cache_folder("kernels"):
        folders += [folder.parent, folder]
    problem = cache_problem(*folders)
    if problem is None:
        return []
    return [
        f"  note      compiled kernels are neither loaded nor kept: {problem}; use "
        "`chmod go-w` or `chown`"
    ]


def adapters(state: AppState, ready: Ready) -> list[str]:
    """Return a line with the names of the LoRA adapters, if the server takes some."""
    if not ready.max_loras:
        return []
    names = ", ".join(adapter.name for adapter in state.adapters) or "none yet"
    return [f"  adapters  {names}; up to {ready.max_loras} in memory"]


def vectors(state: AppState, sentence: SentenceConfig, ready: Ready) -> list[str]:
    """Return the lines of an encoder, which has no KV cache."""
    first = f"  vectors   {state.vector_size()} dimensions, {sentence}"
    if sentence.head is not None:
        first = f"  labels    {sentence.head}"
    return [first, f"  texts     up to {state.max_length()} tokens"]


def sequences(engine: EngineConfig, ready: Ready) -> list[str]:
    """Return the lines of a model that generates."""
    prefixes = "on" if engine.enable_prefix_caching else "off"
    text = (
        f"prefix cache {prefixes}, up to {ready.max_num_seqs} requests at a time "
        "(with n > 1 each choice counts)"
    )
    return [*kv_cache(ready), f"  features  {text}"]


def kv_cache(ready: Ready) -> list[str]:
    """Return the capacity of the KV cache and the share that sliding windows save."""
    length = ready.max_model_len
    each = sum(
        g.max_blocks(length, ready.max_num_batched_tokens + ready.image_tokens, ready.block_size)
        for g in ready.kv_groups
    )
    fitting = ready.num_blocks / each
    room = f"{fitting:.1f}" if fitting < 10 else f"{fitting:.0f}"
    form = f" in {ready.kv_cache_dtype}" if ready.kv_cache_dtype else ""
    when = ", taken as it fills" if ready.device == "cpu" else ""
    lines = [
        f"  KV cache  {decimal(ready.kv_cache_bytes)}{form}{when} "
        f"({ready.num_blocks} blocks of {ready.block_size} tokens): room for "
        f"{room} requests of {length} tokens, the longest supported"
    ]
    if ready.num_state_slots:
        size = decimal(ready.num_state_slots * ready.state_bytes)
        lines.append(
            f"  states    {size}{when} ({ready.num_state_slots} slots of "
            f"{decimal(ready.state_bytes)}): of running requests, and snapshots at block edges"
        )
    layers = sum(group.layers for group in ready.kv_groups)
    windows = sorted({group.window for group in ready.kv_groups if group.window})
    if windows:
        windowed = sum(group.layers for group in ready.kv_groups if group.window)
        # Layers of different groups may differ in bytes, but the blocks of all groups are equal.
        saved = 1 - each / (len(ready.kv_groups) * -(-length // ready.block_size))
        sizes = " or ".join(map(str, windows))
        lines.append(
            f"  windows   {windowed} of {layers} layers keep only the last {sizes} tokens: "
            f"{saved:.0%} less KV cache for a request of {length} tokens"
        )
    return lines


def drafts(ready: Ready) -> list[str]:
    """Return a line with what drafts tokens, unless it is text that repeats, as usual."""
    if ready.drafts_by_head:
        return ["  drafts    by the prediction head of the model (mtp)"]
    if ready.head_unused:
        return [f"  drafts    by text that repeats, not the prediction head: {ready.head_unused}"]
    if ready.speculative_model is None:
        return []
    return [f"  drafts    by {ready.speculative_model}"]


def answers(found: Answers | None, template: ChatTemplate | None = None) -> list[str]:
    """Return how tool calls and reasoning are read, and whether that was confirmed."""
    if found is None:
        return []
    has_tool_use = template is not None and template.has_tool_use
    reasoning = f", reasoning in {found.reasoning_mark}" if found.reasoning_mark else ""
    if found.calls_name is None and has_tool_use:
        how = "hermes, because the template tool_use shows no calls"
    elif found.calls_name is None:
        how = "the chat template shows none, so the system message describes tools (hermes)"
    else:
        how = f"{found.calls_name}, {CALL_SOURCES[found.source]}"
        if has_tool_use:
            how += " (chats with tools have the one named tool_use)"
        if found.round_trips:
            how += ", reads its own calls back"
        else:
            how += ", not confirmed: the template shows no call that could be read back"
    return [f"  tools     {how}{reasoning}"]


def system_messages(template: ChatTemplate | None) -> list[str]:
    """Return a line if the chat template shows system messages at the beginning only."""
    if template is None or not template.for_tools.wants_system_first:
        return []
    return ["  system    messages of a chat are merged at its beginning, as the template needs"]


def memory(ready: Ready) -> list[str]:
    """Return a table of device memory: calculated from shapes, and measured after loading."""
    entries = [entry for entry in ready.memory if entry.planned or entry.measured]
    if not entries:
        return []
    whose = "  of rank 0" if ready.tensor_parallel_size > 1 else ""
    lines = [f"  memory    {'calculated':>18} {'measured':>18}{whose}"]
    for entry in entries:
        measured = "" if entry.measured is None else decimal(entry.measured)
        lines.append(f"            {decimal(entry.planned):>18} {measured:>18}  {entry.name}")
    return lines


def arithmetic(ready: Ready) -> list[str]:
    """Return notes where the dtype costs bitwise reproducibility or speed on this CPU."""
    notes = []
    if ready.amx_note:
        notes.append(f"Penstock's own linear layers do not use AMX: {ready.amx_note}")
    if ready.batch_variance:
        why, cure = BATCH_VARIANCE[ready.batch_variance]
        notes.append(
            f"{why}: the last bits of logits depend on the other requests in a step; "
            f"to prevent it, {cure}"
        )
    elif ready.emulates_bf16:
        notes.append(
            "this CPU has no bf16 instructions: prompts and concurrent streams are "
            "several times slower than with --dtype float32, which needs twice the memory"
        )
    return [f"  note      {note}" for note in notes]


def not_followed(settings: Sequence[str]) -> list[str]:
    """Return a note on settings in generation_config.json that Penstock ignores."""
    if not settings:
        return []
    return [f"  note      generation settings of the checkpoint ignored: {', '.join(settings)}"]


def tokenizer_notes(state: AppState, ready: Ready) -> list[str]:
    """Return notes on the special tokens that begin and end texts."""
    notes = list(state.tokenizer.notes)
    if ready.kind == "decoder" and state.tokenizer.ends_with_eos:
        notes.append("tokenizer.json ends each text with an end token; a completion follows it")
    return [f"  note      {note}" for note in notes]


def shell_key(config: ServerConfig, environ: Mapping[str, str]) -> str:
    """Return a shell expression for an API key, so that the banner does not show the key."""
    if config.api_key_file:
        file = shlex.quote(os.path.abspath(config.api_key_file))
        return f"$(awk '!/^[[:space:]]*#/ && NF {{print $1; exit}}' {file})"
    if environ.get("PENSTOCK_API_KEY", "").partition(",")[0] in config.api_key:
        return "${PENSTOCK_API_KEY%%,*}"
    return UNKNOWN_KEY


def curl(state: AppState, ready: Ready, url: str, key: str) -> str:
    """Return a curl command that fits the model: chat, completion or embedding."""
    body: dict[str, object] = {"model": state.names[0]}
    most = min(64, ready.max_model_len // 4)
    if state.task == "score":
        path, body["query"], body["documents"] = "/v1/rerank", "Hello!", ["Hi.", "A cat."]
    elif ready.kind == "encoder":
        path = "/v1/classify" if state.task == "classify" else "/v1/embeddings"
        body["input"] = "Hello!"
    elif state.template is not None or ready.kind == "encoder-decoder":
        path, body["max_tokens"] = "/v1/chat/completions", most
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        path, body["max_tokens"] = "/v1/completions", most
        body["prompt"] = "Once upon a time"
    access = f' -H "Authorization: Bearer {key}"' if key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl -s {url}{path} -H 'Content-Type: application/json'{access} -d {data}"
