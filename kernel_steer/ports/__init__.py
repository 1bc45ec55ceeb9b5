"""Steered ports: a TCP port per dedicated endpoint, moved from node to node under its clients.

Behind a port are two nodes, both connected for each client. One serves; the other stands by. A flip (one
write into the map `node`, by this process or any other) sends each client's next request to the one that
stands by; a request and its response stay whole on the node where they began. In mode `tcp`, where there
are no requests, a connection moves when no byte was under way for `idle_ms`.

From plain Python, inside a running event loop:

    from kernel_steer.engine import select_engine
    from kernel_steer.engine.base import NodeKey
    from kernel_steer.ports import Backend, Endpoint, Mode, PortServer

    engine = select_engine("auto").engine       # or "kernel", or "relay"
    server = PortServer(engine)                 # host="127.0.0.1"
    await server.apply([
        Endpoint(
            name="bench", port=0, mode=Mode.HTTP,
            primary=Backend(NodeKey("node-a", 1), "127.0.0.1", 8101),
            standby=Backend(NodeKey("node-b", 1), "127.0.0.1", 8102),
        )
    ])
    port = server.number_of("bench")            # clients connect here
    engine.flip(NodeKey("node-a", 1))           # the next requests go to node-b ...
    engine.restore(NodeKey("node-a", 1))        # ... and to node-a again
    server.stats.moved                          # how often a client went on at another node
    server.carried_by_kernel, server.reason     # which engine, and what speaks against the other
    await server.close()
    engine.close()

`apply` is given all ports each time: it opens, retargets and closes what differs. With the kernel engine
a pinned map takes flips of other processes too. The kernel carries a connection by itself while its traffic
is plain (see engine/kernel/ports.bpf.c); user space carries the rest, and hands it back at the next boundary.
"""

from kernel_steer.ports.endpoint import Backend, Endpoint, Mode, PortStats, Timeouts
from kernel_steer.ports.server import PortServer

__all__ = ["Backend", "Endpoint", "Mode", "PortServer", "PortStats", "Timeouts"]
