"""Several choices of one answer, told to one client: `n` single answers, each resumed on its own.

An engine cannot be asked for the rest of one of several choices. So `n` choices are `n` legs from the start,
and here their voices are put together: one identity, one event at a time, one count.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from kernel_steer.engine.wake import ClientWatch
from kernel_steer.journal import Checkpoint, Slot
from kernel_steer.resume.sink import CollectSink, StreamSink


class Chorus:
    """What the choices of one answer share."""

    def __init__(self, sink: StreamSink | CollectSink, slot: Slot, choices: int) -> None:
        self.sink = sink
        self.lock = asyncio.Lock()
        self.envelope: dict[str, Any] = {}  # of the first choice that spoke
        self.prompt_told = False
        self._slot = slot
        self._counts = [Checkpoint() for _ in range(choices)]

    def count(self, index: int, checkpoint: Checkpoint) -> None:
        """The prompt counts once, however many read it."""
        self._counts[index] = checkpoint
        self._slot.save(
            replace(
                self._slot.checkpoint,
                prompt_tokens=max(each.prompt_tokens for each in self._counts),
                completion_tokens=sum(each.completion_tokens for each in self._counts),
                finished=all(each.finished for each in self._counts),
            )
        )

    def usage(self) -> dict[str, int]:
        counted = self._slot.checkpoint
        prompt, completion = counted.prompt_tokens, counted.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ChoiceSink:
    """The client as one choice sees it. Its events get their index, and the identity of the answer."""

    untouched = False  # its events are between those of the others: never spliced

    def __init__(self, chorus: Chorus, index: int) -> None:
        self._chorus = chorus
        self._index = index

    @property
    def streaming(self) -> bool:
        return self._chorus.sink.streaming

    @property
    def watch(self) -> ClientWatch:
        return self._chorus.sink.watch

    @property
    def begun(self) -> bool:
        return self._chorus.sink.begun

    async def begin(self, node_name: str) -> None:
        async with self._chorus.lock:
            await self._chorus.sink.begin(node_name)

    async def event(self, body: dict[str, Any]) -> None:
        chorus = self._chorus
        async with chorus.lock:
            if not chorus.envelope:
                chorus.envelope = {
                    name: body[name] for name in ("id", "object", "created", "model") if name in body
                }
            body = body | chorus.envelope
            body["choices"] = [choice | {"index": self._index} for choice in body["choices"]]
            if chorus.prompt_told:
                body.pop("prompt_token_ids", None)
            chorus.prompt_told = chorus.prompt_told or "prompt_token_ids" in body
            if body.get("usage"):
                body["usage"] = chorus.usage()
            await chorus.sink.event(body)

    async def ping(self) -> None:
        async with self._chorus.lock:
            await self._chorus.sink.ping()


class ChoiceSlot:
    """The journal as one choice sees it. Nothing of it goes through a ring: it is counted as it is told."""

    def __init__(self, chorus: Chorus, index: int) -> None:
        self._chorus = chorus
        self._index = index
        self.checkpoint = Checkpoint()

    def start_leg(self, number: int) -> None:
        self.checkpoint = replace(self.checkpoint, leg=number)

    def save(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._chorus.count(self._index, checkpoint)
