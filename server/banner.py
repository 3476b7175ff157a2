"""What a person sees on stderr while the model loads and once it serves."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.filesize import decimal

from engine.config import EngineConfig
from engine.protocol import Progress, Ready
from server.config import ServerConfig
from server.listen import address_of, is_loopback
from server.service import Service
from server.voice import say

UNKNOWN_KEY = "KEY"  # where one stands that the shell cannot find
UNEVEN = {  # why logits depend on what shares a step, and what makes them equal
    "amx": (
        "this CPU's AMX computes bf16",
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 makes them equal, and slower",
    ),
    "onednn": (
        "threads share a sum in this torch's oneDNN",
        "torch 2.11 and newer makes them equal, and so does --threads 1",
    ),
    "unpacked": (
        "linear weights are not prepacked",
        "--prepack makes them equal, with a torch that has oneDNN",
    ),
}


@contextlib.contextmanager
def load_progress(tell: Callable[[str], None]) -> Iterator[Callable[[Progress], None]]:
    """Shows each Progress it is given: a bar on a terminal, else a line for each new stage."""
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
    """A URL that works from this machine: the wildcard addresses become the loopback ones."""
    address, host = address_of(host), host.strip("[]")
    if address is not None and address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(service: Service, engine: EngineConfig, ready: Ready, port: int) -> str:
    """The facts of the loaded model and a curl line that works as printed."""
    config = service.config
    has_keys = bool(config.api_key or config.api_key_file)
    access = "on" if has_keys else "off"
    key = shell_key(config, os.environ) if has_keys else ""
    url = base_url(config.host, port)
    lines = [
        f"penstock {importlib.metadata.version('penstock')} serves {service.names[0]}: "
        f"{ready.architecture}, {ready.parameters:,} parameters, {ready.dtype}",
        f"  device    {ready.device}, {ready.threads} threads, {ready.attention_backend} attention",
        f"  weights   {decimal(ready.weight_bytes)}, loaded in {ready.load_seconds:.1f} s",
        *(vectors(service, ready) if ready.kind == "encoder" else sequences(engine, ready)),
        *memory(ready),
        f"  access    API key {access}",
        f"  API       {url}/v1   metrics {url}/metrics   OpenAPI {url}/openapi.json",
        f"  try       {curl(service, ready, url, key)}",
    ]
    if key == UNKNOWN_KEY:
        lines.append(f"            with a key of yours for {key}")
    lines += [*arithmetic(ready), *not_followed(service.tokenizer.not_followed)]
    if not is_loopback(config.host) and not has_keys:
        lines.append(
            f"  warning   {config.host} without an API key: whoever reaches this machine may use "
            "it; see --api-key-file"
        )
    return "\n".join(lines)


def vectors(service: Service, ready: Ready) -> list[str]:
    """What an encoder makes of which texts; it keeps no KV."""
    return [
        f"  vectors   of {ready.embedding_size} numbers, {service.pooling}",
        f"  texts     of at most {service.longest()} tokens",
    ]


def sequences(engine: EngineConfig, ready: Ready) -> list[str]:
    prefixes = "on" if engine.enable_prefix_caching else "off"
    text = f"prefix cache {prefixes}, at most {ready.max_num_seqs} sequences in a step"
    return [*kv_cache(ready), f"  features  {text}"]


def kv_cache(ready: Ready) -> list[str]:
    """What the blocks hold, and what windows save."""
    length = ready.max_model_len
    each = sum(
        g.most_blocks(length, ready.max_num_batched_tokens, ready.block_size)
        for g in ready.kv_groups
    )
    lines = [
        f"  KV cache  {ready.num_blocks} blocks of {ready.block_size} tokens "
        f"({decimal(ready.kv_cache_bytes)}): {ready.num_blocks / each:.1f} requests "
        f"of full length ({length} tokens)"
    ]
    layers = sum(group.layers for group in ready.kv_groups)
    windows = sorted({group.window for group in ready.kv_groups if group.window})
    if windows:
        windowed = sum(group.layers for group in ready.kv_groups if group.window)
        per_block = max(group.layers for group in ready.kv_groups)
        saved = 1 - each * per_block / (layers * -(-length // ready.block_size))
        sizes = " or ".join(map(str, windows))
        lines.append(
            f"  windows   {windowed} of {layers} layers keep the last {sizes} tokens: "
            f"{saved:.0%} less KV for a request of full length"
        )
    return lines


def memory(ready: Ready) -> list[str]:
    """Bytes of everything on the device, as foreseen from shapes and as found after loading."""
    entries = [entry for entry in ready.memory if entry.foreseen or entry.found]
    if not entries:
        return []
    lines = [f"  memory    {'bytes foreseen':>18} {'found':>18}"]
    for entry in entries:
        found = "" if entry.found is None else f"{entry.found:,}"
        lines.append(f"            {entry.foreseen:>18,} {found:>18}  {entry.what}")
    return lines


def arithmetic(ready: Ready) -> list[str]:
    """What the dtype costs on this CPU: equal bits, or time."""
    if ready.uneven:
        why, cure = UNEVEN[ready.uneven]
        return [
            f"  note      {why}: logits differ in their last bits with what shares a step; {cure}"
        ]
    if ready.emulated:
        return [
            "  note      this CPU has no instructions for bf16: prompts and many streams are "
            "several times slower than with --dtype float32, which takes twice the memory"
        ]
    return []


def not_followed(settings: Sequence[str]) -> list[str]:
    """What the checkpoint asks for of whoever generates, in vain."""
    if not settings:
        return []
    return [
        f"  note      of the checkpoint's generation settings not followed: {', '.join(settings)}"
    ]


def shell_key(config: ServerConfig, environ: Mapping[str, str]) -> str:
    """What a shell on this machine makes a key of, without the banner showing it."""
    if config.api_key_file:
        file = shlex.quote(os.path.abspath(config.api_key_file))
        return f"$(grep -m1 '^[^#[:space:]]' {file})"
    if environ.get("PENSTOCK_API_KEY", "").partition(",")[0] in config.api_key:
        return "${PENSTOCK_API_KEY%%,*}"
    return UNKNOWN_KEY


def curl(service: Service, ready: Ready, url: str, key: str) -> str:
    """One request for the shell; a model that cannot chat gets a completion."""
    body: dict[str, object] = {"model": service.names[0]}
    most = min(64, ready.max_model_len // 4)
    if ready.kind == "encoder":
        path, body["input"] = "/v1/embeddings", "Hello!"
    elif service.template is not None or ready.kind == "encoder-decoder":
        path, body["max_tokens"] = "/v1/chat/completions", most
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        path, body["max_tokens"] = "/v1/completions", most
        body["prompt"] = "Once upon a time"
    access = f' -H "Authorization: Bearer {key}"' if key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl -s {url}{path} -H 'Content-Type: application/json'{access} -d {data}"
