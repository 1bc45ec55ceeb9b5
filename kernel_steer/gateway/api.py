"""What the gateway answers: one function per address, each readable from top to bottom."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from kernel_steer.admission import Answer, Caller, OnceKey, Outcome, Refusal, Ticket
from kernel_steer.engine import EngineChoice
from kernel_steer.gateway.audience import Audience
from kernel_steer.gateway.hearer import Hearer, ManyClients, OneClient
from kernel_steer.gateway.http import (
    ClientConnection,
    ConnectionClosed,
    Request,
    error_response,
    head,
    json_response,
)
from kernel_steer.gateway.moves import Moves
from kernel_steer.gateway.once import HEADER, RETRY_GRACE_S, Once, once_key, replayed
from kernel_steer.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from kernel_steer.gateway.steering import SignalStats
from kernel_steer.gateway.work import make_work
from kernel_steer.journal import Journal, JournalFull, Slot
from kernel_steer.resume.answer import AnswerRun
from kernel_steer.resume.sink import ClientGone, CollectSink, StreamSink
from kernel_steer.resume.work import Services

if TYPE_CHECKING:
    from kernel_steer.ports import PortServer

log = logging.getLogger("kernel_steer.gateway")


class Gateway:
    """The routes and what they share. `draining`: after its answer, each client is told to go."""

    def __init__(
        self,
        services: Services,
        journal: Journal,
        engine: EngineChoice,
        moves: Moves | None = None,
        signal_stats: SignalStats | None = None,
        retry_grace_s: float = RETRY_GRACE_S,
    ) -> None:
        self.moves = moves or Moves()
        self.signal_stats = signal_stats or SignalStats()
        self.services = services
        self.journal = journal
        self.engine = engine
        self.draining = False
        self.ports: PortServer | None = None  # the steered ones, beside this door
        self._settling: set[asyncio.Task[None]] = set()
        self._once = Once(lambda: 0.0 if self.draining else retry_grace_s)

    async def handle(self, connection: ClientConnection, request: Request) -> bool:
        """Answers one request; returns whether the connection can take another."""
        request_id = str(uuid.uuid4())
        try:
            match request.method, request.path:
                case "GET", "/healthz":
                    await connection.write(
                        json_response(200, self.health(), request_id=request_id, headers=self._goodbye())
                    )
                case "GET", "/v1/models":
                    await self._serve_models(connection, request, request_id)
                case "POST", "/v1/chat/completions":
                    return await self._serve_answer(ChatRequest, connection, request, request_id)
                case "POST", "/v1/completions":
                    return await self._serve_answer(CompletionRequest, connection, request, request_id)
                case _, "/healthz" | "/v1/models" | "/v1/chat/completions" | "/v1/completions":
                    raise Refusal(
                        405, "method_not_allowed", f"{request.method} is not allowed on {request.path}"
                    )
                case _:
                    raise Refusal(404, "not_found", f"There is nothing at {request.path}; see GET /v1/models")
        except Refusal as refusal:
            log.info(
                "request %s %s %s refused: %d %s",
                request_id,
                request.method,
                request.path,
                refusal.status,
                refusal.code,
            )
            await connection.write(error_response(refusal, request_id=request_id, close=self.draining))
        return self._keeps(request)

    def _keeps(self, request: Request) -> bool:
        return request.keep_alive and not self.draining

    def _goodbye(self) -> dict[str, str]:
        """The header that tells a client to take its next request elsewhere, when that is so."""
        return {"connection": "close"} if self.draining else {}

    def health(self) -> dict[str, Any]:
        stats = self.services.engine.stats
        return {
            "status": "draining" if self.draining else "ok",
            "engine": self.services.engine.name,
            "engine_detail": self.engine.reason,
            "answers_open": self.journal.in_use,
            "flows_open": stats.flows_open,
            "flows_total": stats.flows_total,
            "bytes_forwarded": stats.bytes_forwarded,
            "flips": stats.flips,
            "signals_refused": self.signal_stats.refused.total(),
            "circuits_open": len(self.services.circuits.open_nodes),
            "circuits_opened": self.services.circuits.opened,
            **(self.ports.health() if self.ports is not None else {}),
        }

    async def _serve_models(self, connection: ClientConnection, request: Request, request_id: str) -> None:
        caller = await self.services.admission.authenticate(request.headers.get("authorization"))
        cards = await self.services.admission.list_models(caller)
        data = [
            {
                "id": c.name,
                "object": "model",
                "created": c.created,
                "owned_by": c.owned_by,
                "max_model_len": c.context_tokens,
            }
            for c in cards
        ]
        listed = {"object": "list", "data": data}
        await connection.write(json_response(200, listed, request_id=request_id, headers=self._goodbye()))

    async def _serve_answer(
        self,
        kind: type[ChatRequest] | type[CompletionRequest],
        connection: ClientConnection,
        request: Request,
        request_id: str,
    ) -> bool:
        """The way of a request: who, what, may it, do it, tell it, charge it."""
        caller = await self.services.admission.authenticate(request.headers.get("authorization"))
        asked: ChatRequest | CompletionRequest = parse_request(kind, request.body)
        once = once_key(
            request.headers.get(HEADER), key_id=caller.key_id, path=request.path, body=request.body
        )
        if once is not None:
            audience = self._once.join(
                once, lambda audience: self._answer_once(once, audience, caller, asked, request_id)
            )
            return await audience.attend(connection.sock) and self._keeps(request)
        hearer = OneClient(connection)
        try:
            answer = await self._answer(caller, asked, request_id, hearer)
        finally:
            hearer.watch.stop()
        return self._keeps(request) and answer.outcome is Outcome.COMPLETED

    async def _answer_once(
        self,
        once: OnceKey,
        audience: Audience,
        caller: Caller,
        asked: ChatRequest | CompletionRequest,
        request_id: str,
    ) -> None:
        """Answers under an Idempotency-Key, in a task of its own: its clients may come and go."""
        admission = self.services.admission
        refusal: Refusal | None = None
        begun = completed = False
        try:
            kept = await admission.begin_once(once, request_id)
            begun = kept is None
            if kept is not None:
                await audience.say(replayed(kept))
            else:
                answer = await self._answer(caller, asked, request_id, ManyClients(audience))
                completed = answer.outcome is Outcome.COMPLETED
        except Refusal as error:
            refusal = error
        except (ClientGone, ConnectionClosed):
            pass
        except Exception:
            log.exception("request %s failed", request_id)
            refusal = Refusal(500, "internal_error", "The gateway failed on this request.")
        finally:
            # Without a refusal, an audience that heard too little finds its connection closed.
            audience.close(refusal, complete=completed or not begun)
        try:
            if completed:
                await admission.keep_once(request_id, bytes(audience.said) if audience.is_whole else None)
            elif begun:
                await admission.forget_once(request_id)
        except Exception:
            log.exception("request %s: its Idempotency-Key is in use until its time is over", request_id)

    async def _answer(
        self, caller: Caller, asked: ChatRequest | CompletionRequest, request_id: str, hearer: Hearer
    ) -> Answer:
        """Raises Refusal while nothing was told, and ConnectionClosed when no more can be."""
        started = time.monotonic()
        slot = self._open_slot()
        ticket: Ticket | None = None
        answer: Answer | None = None
        try:
            ticket = await self._admit(caller, asked, request_id, slot)
            run = self._make_run(hearer, caller, asked, ticket, slot, request_id, started)
            try:
                with self.moves.tracking(run.choices):
                    answer = await run.run()
            except Refusal:
                raise
            except BaseException as error:
                # A cancelled run (shutdown) and a bug alike: what was delivered is charged.
                answer = run.answer(Outcome.FAILED)
                if run.told and isinstance(error, Exception):
                    log.exception("request %s failed in mid-answer", request_id)
                    raise ConnectionClosed from error  # an error page has no place inside a body
                raise
            if not asked.stream:
                answer = await self._tell_document(hearer, run, answer, request_id)
        finally:
            self._settle_later(slot, request_id, ticket, answer)
        log.info(
            "request %s %s %s: %d+%d tokens, %d legs, %.0f ms", request_id, asked.model, answer.outcome,
            answer.prompt_tokens, answer.completion_tokens, len(answer.legs), (time.monotonic() - started) * 1000,
        )  # fmt: skip
        return answer

    def _open_slot(self) -> Slot:
        try:
            return self.journal.open()
        except JournalFull:
            raise Refusal(
                503, "overloaded", "This gateway has no room for another answer. Try again.", retry_after_s=1
            ) from None

    async def _admit(
        self, caller: Caller, asked: ChatRequest | CompletionRequest, request_id: str, slot: Slot
    ) -> Ticket:
        # The id goes on record before the hold is made: a crash in between releases it by this id.
        slot.write_record({"request_id": request_id, "started_at": time.time()})
        ticket = await self.services.admission.admit(
            caller,
            request_id=request_id,
            model=asked.model,
            prompt_tokens_max=asked.prompt_tokens_max,
            completion_tokens_max=asked.completion_tokens_max and asked.completion_tokens_max * asked.choices,
            choices=asked.choices,
        )
        slot.write_record(
            {
                "request_id": request_id,
                "started_at": time.time(),
                "ticket": ticket.record,
            }
        )
        return ticket

    def _make_run(
        self,
        hearer: Hearer,
        caller: Caller,
        asked: ChatRequest | CompletionRequest,
        ticket: Ticket,
        slot: Slot,
        request_id: str,
        received_at: float,
    ) -> AnswerRun:
        work = make_work(
            asked,
            reasoning=self.services.parts_thoughts(ticket.model),
            request_id=request_id,
            customer=caller.customer_id,
            received_at=received_at,
        )
        sink: StreamSink | CollectSink
        sink = (
            hearer.stream(_stream_head(request_id, self._goodbye()))
            if asked.stream
            else CollectSink(hearer.watch)
        )
        return AnswerRun(work, ticket, sink, slot, self.services)

    async def _tell_document(self, hearer: Hearer, run: AnswerRun, answer: Answer, request_id: str) -> Answer:
        """Writes a collected answer; only then it counts as delivered."""
        if answer.outcome is Outcome.FAILED:
            raise Refusal(
                503, "node_lost", "The answer could not be completed. Nothing was charged.", retry_after_s=2
            )
        if answer.outcome is Outcome.CLIENT_GONE:
            return answer
        node = answer.legs[0].node
        headers = {"x-apex-node": node} | self._goodbye()
        data = json_response(200, run.document(), request_id=request_id, headers=headers)
        await hearer.document(data)
        run.save_told()
        return run.answer(Outcome.COMPLETED)

    def _settle_later(
        self, slot: Slot, request_id: str, ticket: Ticket | None, answer: Answer | None
    ) -> None:
        """Off the client's way. Until it is done, the journal remembers."""
        task = asyncio.get_running_loop().create_task(self._settle(slot, request_id, ticket, answer))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(
        self, slot: Slot, request_id: str, ticket: Ticket | None, answer: Answer | None
    ) -> None:
        try:
            if answer is not None:
                await self.services.admission.settle(answer)
            else:
                await self.services.admission.abandon(request_id, ticket.record if ticket else {})
        except Exception:
            log.exception("request %s is not settled; the journal keeps it for the next start", request_id)
            return
        self.journal.free(slot)

    async def settled(self, timeout_s: float) -> None:
        """Waits for the answers that are being settled or stored."""
        await self._once.ended(timeout_s)
        if self._settling:
            await asyncio.wait(self._settling, timeout=timeout_s)


def _stream_head(request_id: str, more: dict[str, str]) -> bytes:
    return head(
        200,
        {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-request-id": request_id,
            "x-apex-node": "{node}",
            "transfer-encoding": "chunked",
        }
        | more,
    )
