"""What user space and `ports.bpf.c` must agree on: limits, phases, and the words of a connection."""

from __future__ import annotations

from enum import IntEnum

from kernel_steer.ports.http_framing import CHUNK_MAX, Phase

# A longer head is carried by user space. What is looked at is also what a GET is sent again from.
HEAD_MAX = 2048
# Bytes of chunk framing in one segment, some eight for each chunk. With more of them it is passed.
STEPS_MAX = 256
# What may be under way to a peer that has not confirmed it. Each segment costs the kernel up to some 2.3 KB.
UNCONFIRMED_MAX = 256 * 1024
SEGMENTS_MAX = 256

SIDE_AT, SIDE_WORDS = 24, 16
LINK_WORDS = SIDE_AT + 4 * SIDE_WORDS
LINK_BYTES = LINK_WORDS * 8
CLIENT, BACKENDS = 3, (1, 2)


class Word(IntEnum):
    """Position of each member of `struct link`, in words of 8 bytes."""

    KERNEL = 0
    HTTP = 1
    ARMED = 2
    ATTENTION = 3
    FIRST = 4
    IDLE_NS = 5
    PINNED = 6
    REQUESTS = 7
    RESPONSES = 8
    REQUEST_PHASE = 9
    REQUEST_LEFT = 10
    RESPONSE_PHASE = 11
    RESPONSE_LEFT = 12
    REPLAY = 13
    ASKED_HEAD = 14
    LAST_NS = 15
    MOVED = 16


class SideWord(IntEnum):
    """Position of each member of `struct side`."""

    COOKIE = 0
    NODE = 1
    EPOCH = 2
    ACKED = 3
    WRITTEN = 4
    BASE = 5
    PASSED = 6
    REDIRECTED = 7
    SEGMENTS = 8
    CONFIRMED = 9
    CONFIRMED_SEGMENTS = 10
    FIN = 11
    DEAD = 12
    NEXT_POSITION = 13
    POSITIONED = 14
    OVERLAPS = 15


DEFINES = {
    "HEAD_MAX": HEAD_MAX,
    "STEPS_MAX": STEPS_MAX,
    "UNCONFIRMED_MAX": UNCONFIRMED_MAX,
    "SEGMENTS_MAX": SEGMENTS_MAX,
    "CHUNK_MAX": CHUNK_MAX,
} | {phase.name: phase.value for phase in Phase if phase <= Phase.TUNNEL}
