"""The shortest carrier: on the gateway's own host a node flips itself in the kernel, before it says a word.

The maps of a kernel engine are pinned, so a process with the rights writes there what the gateway would have
written. It takes effect though the gateway is busy or stopped; the other carriers tell it a moment later.
"""

from __future__ import annotations

from collections.abc import Set

from kernel_steer.engine.base import NodeKey
from kernel_steer.engine.kernel.pins import NodeMaps
from kernel_steer.signals.message import Signal


class OwnHost:
    """The engines of this platform that are on this machine, ready to be written to.

    Where there are none, or this process may not open their maps, it does nothing, and nothing depends on it.
    """

    def __init__(self) -> None:
        self._maps = NodeMaps()
        self._taken_by: dict[NodeKey, set[str]] = {}  # the sources that say so

    @property
    def engines(self) -> int:
        """In how many engines a flip would be written now."""
        return len(self._maps)

    def refresh(self, owners: Set[str]) -> None:
        """Opens the maps of these owners, as far as they are here. Raises nothing. For one thread."""
        self._maps.refresh(owners)

    def tell(self, signal: Signal) -> int:
        """Writes what the signal says; returns into how many maps. Raises nothing. For one thread.

        Of several sources that take a node, all must take it back.
        """
        node = NodeKey(signal.node, signal.epoch)
        sources = self._taken_by.setdefault(node, set())
        if not signal.is_cancel:
            sources.add(signal.source)
            return self._maps.flip(node)
        sources.discard(signal.source)
        return 0 if sources else self._maps.take_back(node)

    def close(self) -> None:
        self._maps.close()
