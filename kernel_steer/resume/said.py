"""What an answer says, apart from its ids: text, reasoning, tool calls, as the engine's parsers cut it up.

A stream is cut into deltas, and no two nodes cut alike. What counts is what they add up to, strand by strand:
the content, the reasoning, the arguments of the second call. A replaying leg is compared by strands, so its
parser may stop in other places than the lost one did; the client gets what goes beyond what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kernel_steer.engine.base import BadLeg

# ("content",), ("reasoning_content",), ("tool_calls", 0, "arguments"): where in a message a string belongs.
Strand = tuple[str | int, ...]
Piece = tuple[Strand, str]
CONTENT: Strand = ("content",)
# Said once and whole; a second node's id for the same call is another one, and the first stands.
_WHOLE = frozenset({"id", "type", "name"})


class Contradiction(ValueError):
    """A replay says something else than was said."""


def pieces_of(choice: Mapping[str, Any]) -> list[Piece]:
    """The strings of one choice of an event, of either route. Raises BadLeg for what is no delta."""
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text")
        return [(CONTENT, text)] if text else []
    try:
        return [(strand, text) for strand, text in _walk(delta) if text]
    except (AttributeError, KeyError, TypeError) as error:
        raise BadLeg("a delta that is none") from error


def _walk(delta: Mapping[str, Any]) -> Iterator[Piece]:
    for name, value in delta.items():
        if name == "role":
            continue
        if isinstance(value, str):
            yield (name,), value
        elif name == "tool_calls":
            for call in value or ():
                at = ("tool_calls", int(call["index"]))
                function = call.get("function") or {}
                yield (*at, "id"), call.get("id") or ""
                yield (*at, "type"), call.get("type") or ""
                yield (*at, "name"), function.get("name") or ""
                yield (*at, "arguments"), function.get("arguments") or ""


def delta_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The chat delta that says these pieces."""
    delta: dict[str, Any] = {}
    for strand, text in pieces:
        if len(strand) == 1:
            delta[str(strand[0])] = delta.get(str(strand[0]), "") + text
            continue
        _, index, name = strand
        calls = delta.setdefault("tool_calls", [])
        call = next((known for known in calls if known["index"] == index), None)
        if call is None:
            call = {"index": index}
            calls.append(call)
        if name in ("id", "type"):
            call[name] = text
        else:
            function = call.setdefault("function", {})
            function[name] = function.get(name, "") + text
    return delta


def message_of(text: str, strands: Mapping[Strand, str]) -> dict[str, Any]:
    """The assistant's message that the deltas add up to."""
    said = delta_of([((CONTENT), text), *strands.items()] if text else strands.items())
    calls = [
        {name: value for name, value in call.items() if name != "index"}
        for call in sorted(said.pop("tool_calls", []), key=lambda call: call["index"])
    ]
    content = None if calls and not text else text
    return {"role": "assistant", "content": content} | said | ({"tool_calls": calls} if calls else {})


def extend(strands: dict[Strand, str], strand: Strand, text: str) -> None:
    if strand[-1] in _WHOLE:
        strands.setdefault(strand, text)
    else:
        strands[strand] = strands.get(strand, "") + text


class Replayed:
    """How far a replaying leg has come in what was said already."""

    def __init__(self, ids: Iterable[int], text: str, strands: Mapping[Strand, str]) -> None:
        self._ids = list(ids)
        self._told = dict(strands) | ({CONTENT: text} if text else {})
        self._position: dict[Strand, int] = {}
        self._repeated = 0

    def new_ids(self, ids: list[int]) -> list[int]:
        """Those that the client does not have. Raises Contradiction."""
        known = self._ids[self._repeated : self._repeated + len(ids)]
        if ids[: len(known)] != known:
            raise Contradiction("another token than was said")
        self._repeated += len(known)
        return ids[len(known) :]

    def new_pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """What goes beyond what the client has. Raises Contradiction."""
        return [(strand, rest) for strand, text in pieces if (rest := self._new(strand, text))]

    def _new(self, strand: Strand, text: str) -> str:
        told = self._told.get(strand, "")
        if strand[-1] in _WHOLE and len(strand) > 1:
            if told and told != text and strand[-1] != "id":
                raise Contradiction(f"another {strand[-1]} of a tool call than was said")
            return "" if told else text
        position = self._position.get(strand, 0)
        known = told[position : position + len(text)]
        if not text.startswith(known):
            raise Contradiction(f"another {strand[-1]} than was said")
        self._position[strand] = position + len(known)
        return text[len(known) :]

    def end(self) -> None:
        """The leg has finished. Raises Contradiction when it had not come as far as what was said."""
        behind = any(
            self._position.get(strand, 0) < len(told)
            for strand, told in self._told.items()
            if len(strand) == 1 or strand[-1] == "arguments"
        )
        if self._repeated < len(self._ids) or behind:
            raise Contradiction("it ended before what was said")
