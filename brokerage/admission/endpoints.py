"""The steered ports that gateways have open, with where their nodes are at the moment."""

from __future__ import annotations

from brokerage.admission.database import Connection
from kernel_steer.engine.base import NodeKey
from kernel_steer.ports import Backend, Endpoint, Mode

# A suspended customer's ports are closed until it is let in again.
_OPEN = """
SELECT p.id, p.number, p.mode, p.idle_ms, p.connections_max,
       a.name, a.epoch, a.host, a.port, b.name, b.epoch, b.host, b.port
  FROM steered_port p
  JOIN brokerage_customer c ON c.id = p.customer_id
  LEFT JOIN brokerage_node a ON a.id = p.primary_id
  LEFT JOIN brokerage_node b ON b.id = p.standby_id
 WHERE p.state = 'open' AND c.suspended_at IS NULL
 ORDER BY p.number
"""


async def load_endpoints(connection: Connection) -> tuple[Endpoint, ...]:
    """In order of port."""
    cursor = await connection.execute(_OPEN)
    return tuple(
        Endpoint(
            name=str(key),
            port=number,
            mode=Mode(mode),
            primary=_backend(*nodes[:4]),
            standby=_backend(*nodes[4:]),
            idle_ms=idle_ms,
            connections_max=connections_max,
        )
        for key, number, mode, idle_ms, connections_max, *nodes in await cursor.fetchall()
    )


def _backend(name: str | None, epoch: int, host: str, port: int) -> Backend | None:
    """None too for a node that has never reported where it is."""
    return Backend(NodeKey(name, epoch), host, port) if name and host and port else None
