"""What user space and `steer.bpf.c` must agree on: sizes, limits, and the words of a flow."""

from __future__ import annotations

from enum import IntEnum

# The ring of one flow. An event of a token stream has 200 to 400 bytes, so user space is woken once
# in about forty of them. With SEGMENT_MAX of slack this is what a flow costs in locked memory.
RING_BYTES = 16384
# Longer segments are rare in token streams, and a plain read and write is as fast for them. The verifier
# walks through the scan byte by byte: 1024 take it 260,000 steps of the million it allows.
SEGMENT_MAX = 1024
CHUNKS_MAX = 8
# Segments that the client has not taken yet. Each costs the kernel a buffer of its own (some 2.3 KB),
# so together with RING_BYTES this is the most that a client who reads nothing can hold up.
SEGMENTS_MAX = 256
WAKE_BYTES = RING_BYTES * 3 // 4
WAKE_SEGMENTS = SEGMENTS_MAX * 3 // 4

RING_STRIDE = RING_BYTES + SEGMENT_MAX
FLOW_WORDS = 24
FLOW_BYTES = FLOW_WORDS * 8


class Word(IntEnum):
    """Position of each member of `struct flow`, in words of 8 bytes."""

    CLIENT = 0
    SPLICE = 1
    ACKED = 2
    CONSUMED = 3
    CONSUMED_SEGMENTS = 4
    ARMED = 5
    ALREADY_READ = 6
    GENERATION = 7
    NODE = 8
    EPOCH = 9
    PASSED = 16
    REDIRECTED = 17
    SEGMENTS = 18
    LAST_NS = 19
    NEXT_POSITION = 20
    POSITIONED = 21
    OVERLAPS = 22
    FIN = 23


assert max(Word) == FLOW_WORDS - 1
assert RING_BYTES & (RING_BYTES - 1) == 0, "positions are taken modulo the ring with a mask"
assert SEGMENT_MAX & (SEGMENT_MAX - 1) == 0, "so are offsets in a segment"

DEFINES = {
    "RING_BYTES": RING_BYTES,
    "SEGMENT_MAX": SEGMENT_MAX,
    "CHUNKS_MAX": CHUNKS_MAX,
    "SEGMENTS_MAX": SEGMENTS_MAX,
    "WAKE_BYTES": WAKE_BYTES,
    "WAKE_SEGMENTS": WAKE_SEGMENTS,
}
