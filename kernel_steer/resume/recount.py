"""How many tokens reached a client, from the journal alone: one count for bills and for recoveries."""

from __future__ import annotations

from dataclasses import replace

from kernel_steer.journal import Checkpoint
from kernel_steer.resume.chunked import ChunkedDecoder
from kernel_steer.resume.reader import Event, LegReader


def recount(checkpoint: Checkpoint, tail: bytes) -> Checkpoint:
    """`tail` is what was delivered after the checkpoint. An event that was cut does not count."""
    prompt_tokens, completion_tokens = checkpoint.prompt_tokens, checkpoint.completion_tokens

    def count(event: Event) -> None:
        nonlocal prompt_tokens, completion_tokens
        if event.prompt_token_ids is not None and not prompt_tokens:
            prompt_tokens = len(event.prompt_token_ids)
        completion_tokens += len(event.token_ids)

    decoder = ChunkedDecoder.resume(position=checkpoint.counted, chunk_rest=checkpoint.chunk_rest)
    reader = LegReader(count, decoder)
    reader.feed(tail)
    return replace(
        checkpoint,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        finished=checkpoint.finished or reader.complete,
    )
