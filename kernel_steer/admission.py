"""What the gateway asks of the business: who may call, where to send, what was delivered.

The gateway moves bytes and knows nothing of customers, prices or databases. Settings name a class
with this shape (STEER_ADMISSION); brokerage implements it, the gateway's tests use a small double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kernel_steer.ports import Endpoint


class Refusal(Exception):
    """A request that is not served. Becomes an OpenAI-format error; `message` is shown to the caller."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated API key."""

    key_id: str
    customer_id: str


@dataclass(frozen=True, slots=True)
class OnceKey:
    """An Idempotency-Key of an API key, and the digest of the request that it was sent with."""

    key_id: str
    key: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that this caller may use. `reasoning`: its nodes part its thoughts from its answer."""

    name: str
    context_tokens: int
    created: int  # unix seconds
    owned_by: str
    reasoning: bool = False


# A capability that a node reports: its engine parts a model's thoughts from the answer, which no continuation
# from ids could go on with.
REASONING = "reasoning"


class Resume(StrEnum):
    """How an answer that a server has begun can be gone on with by another one of its pool."""

    IDS = "ids"  # it reports token ids and takes them as a prompt, as vLLM does
    TEXT = "text"  # it has no ids, but continues an assistant's message (continue_final_message)
    NONE = "none"  # a plain OpenAI-compatible server


@dataclass(frozen=True, slots=True)
class Upstream:
    """What is different at a third party's API, which is spoken to by TLS only.

    `base_path` stands before `/chat/completions` and ends without a slash, such as `/openai/v1`. `model` is its
    name there. `ca_pem` is the only authority that is trusted, the system's when empty. Addresses that are not
    public are refused but for those in `private_networks`.
    """

    base_path: str
    model: str
    api_key: str = field(default="", repr=False)
    ca_pem: str = field(default="", repr=False)
    private_networks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One inference server as the gateway sees it. `epoch` grows with every start of the node."""

    name: str
    epoch: int
    host: str
    port: int
    tokenizer_id: str = ""
    resume: Resume = Resume.IDS
    upstream: Upstream | None = None  # it is not a machine of ours


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to work on one request: the credit for it is held.

    `record` is what `settle` needs to find its way back after a crash; it is kept in the gateway's
    journal, must be JSON and stay under 2 KiB.
    """

    request_id: str
    model: ModelCard
    completion_tokens_max: int
    record: dict[str, Any] = field(default_factory=dict)


class Outcome(StrEnum):
    """How an answer ended, as the customer's bill sees it."""

    COMPLETED = "completed"  # a finish_reason reached the client
    CLIENT_GONE = "client_gone"  # the client left; what it got is charged
    FAILED = "failed"  # no node could finish it; what was delivered is charged
    RECOVERED = "recovered"  # the gateway died; counted from its journal at the next start


@dataclass(frozen=True, slots=True)
class LegReport:
    """What one node did for an answer: a cost row of the platform, never the customer's."""

    number: int  # from 1
    node: str
    prompt_tokens: int
    completion_tokens: int
    # completed, eof, reset, bad, stalled, diverged, moved, warmed, shadowed, flipped, client_gone
    ended: str
    # Of these, what was read or generated again because another node went away, and which one.
    repeated_tokens: int = 0
    lost_to: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer, exactly once per request_id. Tokens are counted by ids, never by text."""

    request_id: str
    record: dict[str, Any]
    outcome: Outcome
    prompt_tokens: int
    completion_tokens: int
    legs: Sequence[LegReport]
    started_at: datetime
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class FlipReport:
    """One eviction as one gateway saw it (a row of `reroute`). Times are aware UTC."""

    node: str
    epoch: int
    signal_at: datetime  # at the listener
    flipped_at: datetime  # new requests go elsewhere from here on
    flows: int  # answers that were on the node at that moment
    first_byte_at: datetime | None = None  # of the next answer, from another node


class Admission(Protocol):
    """Calls are made from the gateway's event loop and must not block it; `node_draining`,
    `node_restored` and `knows_node` from the signal threads."""

    async def start(self) -> None:
        """Connects and loads what the other calls answer from. Raises when it cannot."""
        ...

    async def stop(self) -> None: ...

    async def authenticate(self, authorization: str | None) -> Caller:
        """`authorization` is the raw header. Raises Refusal 401; the key never appears in the message."""
        ...

    async def list_models(self, caller: Caller) -> Sequence[ModelCard]: ...

    async def admit(
        self,
        caller: Caller,
        *,
        request_id: str,
        model: str,
        prompt_tokens_max: int,
        completion_tokens_max: int | None,
        choices: int = 1,
    ) -> Ticket:
        """Holds the credit for the most that the request can cost, before any work is done.

        `completion_tokens_max` is for all `choices` together; without it each may fill the context.
        Idempotent by request_id. Raises Refusal: 404 unknown model, 400 prompt over the context,
        402 not enough credit (the message names the shortfall), 429 over a limit or budget of the caller (the
        message names it, with Retry-After). What a cancelled call may have taken, `abandon` gives back.
        """
        ...

    async def begin_once(self, once: OnceKey, request_id: str) -> bytes | None:
        """Puts the intent to answer on record, before any work: from now on `once` belongs to `request_id`.

        Returns the stored HTTP answer when there is one. Raises Refusal: 409 while another gateway works on
        it (with Retry-After) or when the answer was not stored, 422 when the key was used for another
        request, 503 when that cannot be told. A gateway that dies loses its claims by itself.
        """
        ...

    async def keep_once(self, request_id: str, answer: bytes | None) -> None:
        """The answer reached its end: stores it for a day; None for one that is too long to store."""
        ...

    async def forget_once(self, request_id: str) -> None:
        """It did not: the key is free again."""
        ...

    def choose_node(
        self, model: str, *, exclude: frozenset[str] = frozenset(), prefix: bytes = b""
    ) -> Node | None:
        """The node for the next leg, from memory; None when there is none. Draining nodes are never given.

        `prefix` is a digest of how the prompt begins: who read the same beginning may have it in its cache.
        Counts as one leg on that node until `node_released`.
        """
        ...

    def node_released(self, name: str, epoch: int) -> None:
        """The leg that `choose_node` gave the node for has ended, or never began."""
        ...

    def node_draining(self, name: str, epoch: int) -> None:
        """The signal path says so: `choose_node` must not give this incarnation from now on."""
        ...

    def node_restored(self, name: str, epoch: int) -> None:
        """Takes `node_draining` for this incarnation back: the eviction was cancelled."""
        ...

    def knows_node(self, name: str) -> bool:
        """Whether there is a node of that name, in whatever state. From memory, from any thread."""
        ...

    def node_failed(self, name: str, epoch: int, reason: str) -> None:
        """A leg died or could not be opened: keep off the node for a while."""
        ...

    async def settle(self, answer: Answer) -> None:
        """Makes the usage durable. After it returns, the journal forgets the answer.

        Called again with the same request_id after a crash: must count once. With zero completion
        tokens nothing is charged and the hold is released.
        """
        ...

    async def abandon(self, request_id: str, record: dict[str, Any]) -> None:
        """Releases the hold of a request that was never started (also when no hold was made)."""
        ...

    def node_misconfigured(self, name: str, epoch: int, reason: str) -> None:
        """A third party does not take what staff have set (its key, path or model): no legs until that changes."""
        ...

    def endpoints(self) -> Sequence[Endpoint]:
        """The steered ports that this gateway should have open, from memory. Asked twice a second."""
        ...

    async def report_flip(self, report: FlipReport) -> None:
        """Stores or completes the `reroute` row; idempotent by (node, epoch)."""
        ...
