"""SGLang's way with the same dialect, from its source (0.5.x): what differs from vLLM on the wire.

The finish reason comes in a chunk of its own, after all text. An abort that nobody gave a status to ends the stream
like any other reason, and may say the last token once more before it; one with a status is an error event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.kernel_steer.engine_double import EngineDouble


@dataclass
class FakeSglang(EngineDouble):
    repeats: bool = False  # the last token before an abort; only a running usage tells

    def body(self, path: str, body: dict[str, Any]) -> list[tuple[int, bytes]]:
        return list(_as_sglang(super().body(path, body), repeats=self.repeats))


def _as_sglang(chunks: list[tuple[int, bytes]], *, repeats: bool) -> Iterator[tuple[int, bytes]]:
    said: dict[str, Any] | None = None
    for told, chunk in chunks:
        payload = chunk.partition(b"\r\n")[2]
        if not payload.startswith(b"data: {") or b'"error"' in payload:
            yield told, chunk
            continue
        event = json.loads(payload.partition(b"\n\n")[0][6:])
        choice = event["choices"][0] if event["choices"] else {}
        reason = choice.get("finish_reason")
        if reason == "abort":
            if repeats and said is not None:
                yield told, _chunk(_without_words(said))
        elif choice.get("token_ids"):
            said = event | {"choices": [choice | {"finish_reason": None}]}
            yield told, _chunk(said)
        elif reason is None:
            yield told, chunk
        if reason:
            last = {"index": 0, "delta": {}, "text": "", "finish_reason": reason, "matched_stop": None}
            yield told, _chunk(event | {"choices": [last]})


def _without_words(event: dict[str, Any]) -> dict[str, Any]:
    """The text so far is the same, so its difference is nothing; the id is there again."""
    choice = dict(event["choices"][0])
    choice |= {"delta": {"content": ""}} if "delta" in choice else {"text": ""}
    return event | {"choices": [choice]}


def _chunk(event: dict[str, Any]) -> bytes:
    payload = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(payload), payload)
