"""A steered HTTP/1.1 connection: requests are framed, and each may be served by another node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_steer.admission import Refusal
from kernel_steer.gateway.http import error_response
from kernel_steer.ports.connection import Connection
from kernel_steer.ports.end import ClientLost
from kernel_steer.ports.endpoint import Mode
from kernel_steer.ports.exchange import Exchange, Result
from kernel_steer.ports.http_framing import BadMessage, read_request_head
from kernel_steer.ports.tunnel import Tunnel

if TYPE_CHECKING:
    from kernel_steer.ports.link import Link

_NO_NODE = Refusal(503, "no_node", "No node of this endpoint can be reached.", retry_after_s=1)
_NODE_LOST = Refusal(
    502, "node_lost", "The node was lost before it answered; it may have worked on the request."
)


class HttpConnection(Connection):
    mode = Mode.HTTP

    engaged = False
    _buffer = b""  # what the client sent after the last request

    async def serve(self) -> None:
        """See Connection.run."""
        await self.find()  # or the kernel would take the node that is connected first
        while True:
            exchange = await self._carried() or (None if self.leaving else await self._next_request())
            if exchange is None or not await self._finish(exchange) or self.leaving:
                return
            if self.link is None or not self.link.is_open:
                self.engaged = False
                self.housekeep()

    # --- in the kernel -----------------------------------------------------------------------------------

    async def _carried(self) -> Exchange | None:
        """Lets the kernel carry the connection. None when user space is needed between two requests."""
        link, client = self.link, self.client
        if link is None or self._buffer or client.ended:
            return None
        attention = False  # mid-request, but something is to be done at its end
        while True:
            if attention:
                link.start(attention=True)
            else:
                self._to_kernel()
            await link.sleep()
            self.take_over()
            if link.has_overlapped(client):
                raise ClientLost("a retransmission overlapped")
            self.engaged = not link.at_boundary
            self.housekeep()
            if link.at_boundary:
                attention = False
                if link.has_unread(client) or link.has_ended(client) or self.leaving:
                    break
            elif self._needs_user_space(link):
                self.stats.to_user_space += 1
                return self._in_flight(link)
            else:
                attention = True
        self.stats.to_user_space += link.has_unread(client)
        return None

    def _to_kernel(self) -> None:
        """Between two requests: the next one may go through the kernel."""
        link = self.link
        if link is None or link.is_open:
            return
        serving = self.backends.get(self.pinned)
        if serving is not None and self.is_unwanted(serving):
            return  # it is only kept until now
        link.set_boundary(pinned=self.pinned if serving else 0, first=self._order()[0])
        link.start(attention=False)

    def _needs_user_space(self, link: Link) -> bool:
        serving = self.backends[self.pinned]
        if link.has_overlapped(serving):
            raise ClientLost("a retransmission overlapped")
        return any(link.has_unread(end) or link.has_ended(end) for end in (self.client, serving))

    def _in_flight(self, link: Link) -> Exchange:
        return Exchange(
            method=b"HEAD" if link.asked_head else b"",
            request=link.request,
            unsent=b"",
            replay=link.replay,
            response=link.response,
            on_boundary=self._to_kernel,
        )

    # --- in user space -----------------------------------------------------------------------------------

    async def _next_request(self) -> Exchange | None:
        """None when the client has no more."""
        try:
            while (head := read_request_head(self._buffer)) is None:
                data = await self.client.read()
                if not data:
                    return None
                self._buffer += data
        except BadMessage as bad:
            await self._refuse(Refusal(400, "bad_request", f"The request cannot be read: {bad}."))
            return None
        data, self._buffer = self._buffer, b""
        try:
            length = head.length + head.body.feed(data[head.length :])
        except BadMessage as bad:
            await self._refuse(Refusal(400, "bad_request", f"The request cannot be read: {bad}."))
            return None
        exchange = Exchange(
            method=head.method,
            request=head.body,
            unsent=data[:length],
            replay=data[:length] if head.may_be_sent_twice else None,
            keep_alive=head.keep_alive,
            on_boundary=self._to_kernel,
        )
        exchange.rest = data[length:]
        self.housekeep()
        side = await self.find()
        if not side:
            self.stats.unserved += 1
            await self._refuse(_NO_NODE)
            return None
        self.pin(side)
        self.engaged = True
        return exchange

    async def _finish(self, exchange: Exchange) -> bool:
        """Whether the connection goes on."""
        while True:
            backend = self.backends[self.pinned]
            result = await exchange.run(self.client, backend)
            if result is not Result.UNANSWERED:
                break
            self.drop(self.pinned)
            if not exchange.may_go_elsewhere:
                self.stats.unserved += 1
                await self._refuse(_NODE_LOST)
                return False
            side = await self.find()
            if not side:
                self.stats.unserved += 1
                await self._refuse(_NO_NODE)
                return False
            exchange.send_again()
            self.stats.sent_again += 1
            self.pin(side)
        self._buffer = exchange.rest
        match result:
            case Result.COMPLETE if exchange.keep_alive:
                return True
            case Result.COMPLETE:
                await self.client.linger(self.timeouts.linger_s)
            case Result.TUNNEL:
                await Tunnel(self).run(self._buffer)
            case Result.CUT:
                self.stats.cut += 1
                if not exchange.shows_its_end:
                    self.client.abort()
            case Result.BAD_REQUEST:
                await self._refuse(
                    Refusal(400, "bad_request", f"The request cannot be read: {exchange.complaint}.")
                )
            case Result.BAD_RESPONSE:
                self.stats.unserved += 1
                await self._refuse(
                    Refusal(502, "bad_response", f"The node's answer cannot be read: {exchange.complaint}.")
                )
        return False

    async def _refuse(self, refusal: Refusal) -> None:
        """The last words of this connection."""
        await self.client.write(error_response(refusal, request_id="-", close=True))
        await self.client.linger(self.timeouts.linger_s)
