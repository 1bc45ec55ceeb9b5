"""llama.cpp's HTTP server in the foreground, without a compiler: it lives in the xllamacpp wheel.

    python -m kernel_steer.node.llama_server --port 8101 [--model PATH] [--slots 8] [--context 2048]

Speaks llama.cpp's own dialect on loopback; `kernel_steer.node.adapter` puts the platform's in front.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from kernel_steer.node.child import die_with_parent
from kernel_steer.node.llamacpp import CONTEXT_RESERVE
from kernel_steer.node.models import ModelUnavailable, ensure_demo_model

# A base model has no chat template. Without one llama.cpp uses ChatML, whose markers are not words of
# such a vocabulary. A plain dialogue is what a base model has seen in its training.
PLAIN_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{- message['content'] + '\\n\\n' -}}"
    "{%- elif message['role'] == 'user' -%}{{- 'User: ' + message['content'] + '\\n' -}}"
    "{%- else -%}{{- 'Assistant: ' + message['content'] + '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)
# Metadata lies before the weights.
_METADATA_BYTES_MAX = 64 << 20


def default_threads() -> int:
    """Half the cores: llama.cpp's threads wait for each other by spinning, and crawl on cores they must share."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def has_chat_template(model: Path) -> bool:
    with model.open("rb") as file:
        return b"tokenizer.chat_template" in file.read(_METADATA_BYTES_MAX)


def serve(*, model: Path, host: str, port: int, slots: int, context: int, threads: int) -> None:
    """Never returns. `context` is in tokens and per answer; `slots` is answers at a time."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames = [host]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * (context + CONTEXT_RESERVE)
    params.n_threads_http = slots + 4  # one per running answer, some for health and tokenize
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = threads
        # Nodes share the cores with each other and with the platform: wait asleep, not spinning.
        cpu.poll = 0
    # Small batches: a long prompt must not hold up the tokens of the other answers.
    params.n_batch = params.n_ubatch = 256
    # Whole keys and values also for sliding-window layers, so that a common prompt is computed once.
    params.swa_full = True
    params.cache_ram_mib = 0
    params.warmup = True
    params.ui = False
    params.verbosity = 1
    # An assistant message at the end is history, as in OpenAI's API, never something to continue.
    params.prefill_assistant = False
    if not has_chat_template(model):
        params.chat_template = PLAIN_CHAT_TEMPLATE
    server = xllamacpp.Server(params)
    print(f"llama.cpp serves {model.name} at {server.listening_address}", file=sys.stderr, flush=True)  # noqa: T201
    while True:
        signal.pause()


def main() -> None:
    # Nothing here must be saved, and the engine's threads cannot be joined: a signal ends it at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m kernel_steer.node.llama_server")
    parser.add_argument("--model", type=Path, help="GGUF file; without it the demo model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=8, help="answers at the same time")
    parser.add_argument("--context", type=int, default=2048, help="tokens per answer, prompt included")
    parser.add_argument("--threads", type=int, default=default_threads())
    arguments = parser.parse_args()
    try:
        model = arguments.model or ensure_demo_model()
        if not model.is_file():
            raise ModelUnavailable(f"--model {model} does not exist")
    except ModelUnavailable as error:
        sys.exit(f"apex: {error}")
    serve(
        model=model,
        host=arguments.host,
        port=arguments.port,
        slots=arguments.slots,
        context=arguments.context,
        threads=arguments.threads,
    )


if __name__ == "__main__":
    main()
