"""Flags of other servers, with what takes their place in Penstock.

`penstock serve` refuses them with that advice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

LLAMA, VLLM, SGLANG, OLLAMA = "llama.cpp", "vLLM", "SGLang", "Ollama"

# Flags that Penstock has under another name.
SAME: dict[str, dict[str, str]] = {
    LLAMA: {
        "-m": "--model",
        "-c": "--max-model-len",
        "--ctx-size": "--max-model-len",
        "-np": "--max-num-seqs",
        "--parallel": "--max-num-seqs",
        "-b": "--max-num-batched-tokens",
        "--batch-size": "--max-num-batched-tokens",
        "-ub": "--max-num-batched-tokens",
        "--ubatch-size": "--max-num-batched-tokens",
        "-t": "--threads",
        "-s": "--seed",
        "-tb": "--threads",
        "--threads-batch": "--threads",
        "-dev": "--device",
        "-fa": "--attention-backend",
        "--flash-attn": "--attention-backend",
        "-ctk": "--kv-cache-dtype",
        "--cache-type-k": "--kv-cache-dtype",
        "-ctv": "--kv-cache-dtype",
        "--cache-type-v": "--kv-cache-dtype",
        "-ts": "--tensor-parallel-size",
        "--tensor-split": "--tensor-parallel-size",
        "-sm": "--tensor-parallel-size",
        "--split-mode": "--tensor-parallel-size",
        "-a": "--served-model-name",
        "--alias": "--served-model-name",
        "-md": "--speculative-model",
        "--model-draft": "--speculative-model",
        "--lora": "--lora-modules",
        "--chat-template-file": "--chat-template",
        "--reasoning-format": "--reasoning-parser",
        "--api-prefix": "--root-path",
        "-to": "--send-timeout",
        "--timeout": "--send-timeout",
        "--no-webui": "--no-ui",
        "--webui": "--ui",
        "-v": "--log-level debug",
        "--verbose": "--log-level debug",
        "-lv": "--log-level",
        "--log-verbosity": "--log-level",
        "--log-disable": "--log-level error",
    },
    VLLM: {
        "-tp": "--tensor-parallel-size",
        "-q": "--quantization",
        "-O": "--enforce-eager",
        "--no-enable-log-requests": "--no-access-log",
        "--disable-log-requests": "--no-access-log",
        "--disable-uvicorn-access-log": "--no-access-log",
        "--uvicorn-log-level": "--log-level",
        "--enable-log-requests": "--access-log",
        "--speculative-config": "--speculation",
        "--enable-lora": "--lora-modules",
        "--otlp-traces-endpoint": "--tracing",
        "--kv-cache-memory": "--kv-cache-memory-bytes",
        "--default-chat-template-kwargs": "--reasoning",
        "--allowed-media-domains": "--image-hosts",
    },
    SGLANG: {
        "--model-path": "--model",
        "--context-length": "--max-model-len",
        "--max-running-requests": "--max-num-seqs",
        "--max-prefill-tokens": "--max-num-batched-tokens",
        "--chunked-prefill-size": "--max-num-batched-tokens",
        "--mem-fraction-static": "--gpu-memory-utilization",
        "--tp": "--tensor-parallel-size",
        "--tp-size": "--tensor-parallel-size",
        "--page-size": "--block-size",
        "--disable-cuda-graph": "--enforce-eager",
        "--disable-radix-cache": "--no-enable-prefix-caching",
        "--enable-deterministic-inference": "--batch-invariant",
        "--lora-paths": "--lora-modules",
        "--speculative-algorithm": "--speculation",
        "--speculative-draft-model-path": "--speculative-model",
        "--admin-api-key": "--admin-key-file",
        "--random-seed": "--seed",
        "--log-requests": "--access-log",
        "--watchdog-timeout": "--stall-timeout",
        "--max-total-tokens": "--kv-cache-memory-bytes",
    },
    OLLAMA: {"--num-ctx": "--max-model-len", "--num-parallel": "--max-num-seqs"},
}

_ALWAYS = "it is always on"
_WITHOUT = "Penstock needs no such flag"
_REQUEST = "send it with each request"
# Flags without a counterpart, with the reason.
INSTEAD: dict[str, dict[str, str]] = {
    LLAMA: {
        "-hf": "give the repository as MODEL: penstock serve ORG/NAME, with --gguf-file FILE",
        "-hfr": "give the repository as MODEL: penstock serve ORG/NAME",
        "--hf-repo": "give the repository as MODEL: penstock serve ORG/NAME",
        "-hff": "use --gguf-file FILE",
        "--hf-file": "use --gguf-file FILE",
        "-ngl": "all layers are on the GPU, if there is one; see --device",
        "--gpu-layers": "all layers are on the GPU, if there is one; see --device",
        "--n-gpu-layers": "all layers are on the GPU, if there is one; see --device",
        "-cb": _ALWAYS,
        "--cont-batching": _ALWAYS,
        "--jinja": "templates are always Jinja",
        "--metrics": "/metrics is served by default; see --metrics-compat llamacpp",
        "--slots": "/slots is served unless --disabled-paths has it",
        "--no-slots": "use --disabled-paths /slots",
        "--props": "/props can be read, but not be changed",
        "--embedding": "the checkpoint says whether it makes vectors",
        "--embeddings": "the checkpoint says whether it makes vectors",
        "--rerank": "the checkpoint says whether it makes vectors",
        "--reranking": "the checkpoint says whether it makes vectors",
        "--mlock": _WITHOUT,
        "--mmap": "weights are always mapped",
        "--no-mmap": "weights are always mapped",
        "-n": "send max_tokens with each request",
        "--predict": "send max_tokens with each request",
        "--n-predict": "send max_tokens with each request",
        "--temp": "send temperature with each request",
        "--temperature": "send temperature with each request",
        "--top-k": _REQUEST,
        "--top-p": _REQUEST,
        "--min-p": _REQUEST,
        "--repeat-penalty": "send repetition_penalty with each request",
        "--no-mmproj": "move the mmproj file out of the folder of the model",
        "--mmproj": "put the mmproj file into the folder of the model; see docs/images.md",
        "--rope-scaling": "the checkpoint's own RoPE scaling is used",
        "--no-warmup": _WITHOUT,
        "--context-shift": "an answer ends at the end of the context",
        "--no-context-shift": "an answer always ends at the end of the context",
        "--cache-reuse": "prompts share equal beginnings; see --enable-prefix-caching",
        "--slot-save-path": "the KV cache is not saved; equal prompts share it while it lasts",
        "--reasoning-budget": "use --reasoning off for 0, or thinking_token_budget of a request",
        "--threads-http": _WITHOUT,
        "--numa": "start the server with numactl",
        "--ssl-key-file": "a proxy does TLS; see docs/security.md",
        "--ssl-cert-file": "a proxy does TLS; see docs/security.md",
    },
    VLLM: {
        "--trust-remote-code": "code of a checkpoint is never executed",
        "--enable-chunked-prefill": _ALWAYS,
        "--enable-auto-tool-choice": _ALWAYS,
        "--enable-request-id-headers": "every answer has x-request-id",
        "--enable-prompt-tokens-details": "usage has prompt_tokens_details without it",
        "--enable-server-load-tracking": "/load is always served",
        "--enable-tokenizer-info-endpoint": "/tokenizer_info is always served",
        "--middleware": "the server imports no code of others; put a proxy before it",
        "--kv-transfer-config": "prompts and answers are computed by one server",
        "--swap-space": "preempted requests are computed again",
        "--cpu-offload-gb": "weights are not offloaded; see --plan",
        "--tokenizer": "the tokenizer is the checkpoint's",
        "--revision": "the newest revision is downloaded; give a local folder for another",
        "--task": "the checkpoint says what it is for",
        "--runner": "the checkpoint says what it is for",
        "--download-dir": "set HF_HOME",
        "--hf-token": "set HF_TOKEN",
        "--ssl-keyfile": "a proxy does TLS; see docs/security.md",
        "--ssl-certfile": "a proxy does TLS; see docs/security.md",
        "-pp": "use --tensor-parallel-size, or one server for each GPU",
        "--pipeline-parallel-size": "use --tensor-parallel-size, or one server for each GPU",
        "-dp": "start one server for each GPU",
        "--data-parallel-size": "start one server for each GPU",
        "--allowed-local-media-path": "images are not read from files; send a data: URL",
        "--limit-mm-per-prompt": "a request may have 100 images; see docs/images.md",
        "--disable-log-stats": "metrics are at /metrics, and are not logged",
        "--generation-config": "generation_config.json of the checkpoint is used",
        "--hf-overrides": "change config.json in a copy of the checkpoint",
        "--tokenizer-mode": "the tokenizer is the checkpoint's",
        "--guided-decoding-backend": "structured output needs no choice",
        "--structured-outputs-config": "structured output needs no choice",
        "--distributed-executor-backend": "the ranks are processes of one machine",
        "--enable-expert-parallel": "use --tensor-parallel-size",
        "--max-seq-len-to-capture": "steps of all lengths are captured; see --enforce-eager",
        "--tool-parser-plugin": "the server imports no code of others; see --tool-call-parser",
    },
    SGLANG: {
        "--dp": "start one server for each GPU",
        "--dp-size": "start one server for each GPU",
        "--ep-size": "use --tensor-parallel-size",
        "--enable-metrics": "/metrics is always served",
        "--is-embedding": "the checkpoint says whether it makes vectors",
        "--tokenizer-path": "the tokenizer is the checkpoint's",
        "--grammar-backend": "structured output needs no choice",
        "--sampling-backend": _WITHOUT,
        "--schedule-policy": "the queue is in order of priority, then of arrival",
        "--stream-interval": "each token is sent at once",
    },
    OLLAMA: {
        "--keepalive": "the model stays loaded until the server ends",
        "--keep-alive": "the model stays loaded until the server ends",
        "--think": "use --reasoning, or reasoning_effort of a request",
    },
}


def advice(flag: str, known: Collection[str]) -> str:
    """Return what takes the place of `flag`, or "" if no served flag or server has this name.

    `known` are Penstock's own flags.
    """
    dashed = flag.replace("_", "-")
    if flag != dashed and dashed in known:
        return f"{flag} is written {dashed}."
    for server, flags in SAME.items():
        if dashed in flags:
            return f"{flag} is a flag of {server}; Penstock's is {flags[dashed]}."
    for server, reasons in INSTEAD.items():
        if dashed in reasons:
            return f"{flag} is a flag of {server}: {reasons[dashed]}."
    return ""


def all_advice(arguments: Sequence[str], known: Collection[str]) -> str:
    """Return the advice for each unknown flag that has one, a line each; "" if there is none."""
    found: list[str] = []
    for argument in arguments:
        if argument == "--":
            break
        flag = argument.partition("=")[0]
        if flag.startswith("-") and flag not in known:
            text = advice(flag, known)
            if text and text not in found:
                found.append(text)
    return "\n".join(found)
