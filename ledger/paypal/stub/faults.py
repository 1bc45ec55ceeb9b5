"""What goes wrong on demand. Set through POST /control/faults; each fault counts down to nothing."""

from __future__ import annotations

from collections import Counter

KINDS = {
    "error": "500 before anything is done",
    "lost": "the work is done, the connection breaks before the answer",
    "slow": "the answer comes after `delay_s`",
    "busy": "409, as for a call whose twin is still under way",
    "pending": "the capture or refund is PENDING until it is completed through /control",
    "declined": "the capture or refund is refused with 422",
}
OPERATIONS = (
    "token", "create", "get", "capture", "refund", "get_refund", "get_dispute", "search", "balances",
    "verify", "certificate", "postback",
)  # fmt: skip


class Faults:
    """`fee_back` is what PayPal gives back of its fee with each refund."""

    def __init__(self) -> None:
        self._left: Counter[tuple[str, str]] = Counter()
        self.delay_s = 1.0
        self.webhook_copies = 1
        self.fee_back = "0.00"

    def set(self, operation: str, kind: str, times: int) -> None:
        if operation not in OPERATIONS or kind not in KINDS:
            raise ValueError(f"operation is one of {', '.join(OPERATIONS)}, kind one of {', '.join(KINDS)}")
        self._left[operation, kind] = times

    def take(self, operation: str, kind: str) -> bool:
        """Whether it shall happen now; uses it up once."""
        if self._left[operation, kind] <= 0:
            return False
        self._left[operation, kind] -= 1
        return True

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def shown(self) -> dict[str, object]:
        left = {f"{operation}.{kind}": count for (operation, kind), count in self._left.items() if count > 0}
        return {
            "left": left,
            "delay_s": self.delay_s,
            "webhook_copies": self.webhook_copies,
            "fee_back": self.fee_back,
        }
