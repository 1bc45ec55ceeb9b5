"""What the parts of the stub share."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from ledger.paypal.stub.faults import Faults
from ledger.paypal.stub.notifications import Notifications
from ledger.paypal.stub.store import Store
from ledger.paypal.stub.webhooks import Webhooks


@dataclass
class Stub:
    """`tokens` are the access tokens given out since the start; older ones are not valid any more."""

    store: Store
    webhooks: Webhooks
    notifications: Notifications
    faults: Faults = field(default_factory=Faults)
    tokens: set[str] = field(default_factory=set)


STUB = web.AppKey("stub", Stub)
