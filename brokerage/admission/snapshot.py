"""What the gateway knows by heart: keys, models with prices, nodes. Read anew twice a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from brokerage.admission.database import Connection
from brokerage.admission.endpoints import load_endpoints
from brokerage.admission.hazard import Experience, Zone, expected_cost, hazard
from brokerage.admission.limits import NO_LIMITS, KeyLimits
from brokerage.services.rating import rate
from brokerage.services.secrets import SecretUnreadable, unseal
from brokerage.services.upstreams import as_node
from kernel_steer.admission import ModelCard, Node, Resume
from kernel_steer.ports import Endpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownCustomer:
    customer_id: str
    currency: str
    wallet_id: int  # ledger account


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key that may be used; revoked ones and those of suspended customers are not known."""

    key_id: str
    customer: KnownCustomer
    expires_at: datetime | None
    limits: KeyLimits = NO_LIMITS

    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class SoldModel:
    """A model with its price in one currency, per token."""

    card: ModelCard
    served_model_id: int
    price_id: int
    currency: str
    prompt_rate: Decimal
    completion_rate: Decimal

    def cost(self, prompt_tokens: int, completion_tokens: int) -> Decimal:
        return rate(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            prompt_rate=self.prompt_rate,
            completion_rate=self.completion_rate,
        )


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """`slots` is how many answers it works on at the same time, `cost` what a useful hour costs us (USD)."""

    node: Node
    slots: int
    cost: float = 0.0
    silent: bool = False  # its heartbeats are missing; it may be alive


@dataclass(frozen=True, slots=True)
class Snapshot:
    keys: dict[bytes, KnownKey] = field(default_factory=dict)  # by SHA-256 of the key
    customers: dict[str, KnownCustomer] = field(default_factory=dict)
    limits: dict[str, KeyLimits] = field(default_factory=dict)  # by key id, of those that have any
    models: dict[tuple[str, str], SoldModel] = field(default_factory=dict)  # by name and currency
    budgeted: frozenset[str] = frozenset()  # customers with budgets
    called: frozenset[int] = frozenset()  # wallets whose leases are called for
    nodes: dict[str, tuple[ReadyNode, ...]] = field(default_factory=dict)  # by model, in order of name
    node_names: frozenset[str] = frozenset()  # in whatever state
    endpoints: tuple[Endpoint, ...] = ()  # steered ports that are open
    loaded_at: float = 0.0  # time.monotonic() before the first query

    def age_s(self) -> float:
        return time.monotonic() - self.loaded_at

    def learn(self, digest: bytes, key: KnownKey) -> None:
        """A key that was looked up between two loads."""
        self.keys[digest] = key
        self.customers[key.customer.customer_id] = key.customer
        if key.limits:
            self.limits[key.key_id] = key.limits


# The wallet is named by the customer's id: Customer.wallet_code.
_KEYS = """
SELECT k.key_hash, k.id::text, k.expires_at, c.id::text, c.currency, a.id,
       k.requests_per_minute, k.tokens_per_minute, k.concurrent_answers
  FROM brokerage_apikey k
  JOIN brokerage_customer c ON c.id = k.customer_id
  JOIN ledger_account a ON a.code = 'customer_credit:' || c.id
 WHERE k.revoked_at IS NULL
   AND (k.expires_at IS NULL OR k.expires_at > now())
   AND c.suspended_at IS NULL
"""
_MODELS = """
SELECT m.id, m.name, m.context_tokens, m.created_at, m.capabilities ? 'reasoning' OR EXISTS (
           SELECT FROM brokerage_node n WHERE n.served_model_id = m.id AND n.capabilities ? 'reasoning'),
       p.id, p.currency, p.prompt_rate, p.completion_rate
  FROM brokerage_servedmodel m
  JOIN brokerage_modelprice p ON p.served_model_id = m.id AND p.valid @> now()
 WHERE m.enabled
 ORDER BY m.name
"""
_CALLED = "SELECT account_id FROM brokerage_leasecall WHERE called_at > now() - interval '2 seconds'"
# A node that has only fallen silent is kept for a while, as a last resort: when the control plane is
# slow, it is the heartbeats that are late and not the nodes. One that is dead refuses at once.
_NODES = """
SELECT m.name, n.name, n.epoch, n.host, n.port, n.tokenizer_id, n.capabilities, n.slots, n.hourly_rate,
       n.state = 'gone' AS silent, n.provider, n.zone, u.base_url, u.model, u.sealed_key, u.ca_pem
  FROM brokerage_node n
  JOIN brokerage_servedmodel m ON m.id = n.served_model_id
  LEFT JOIN brokerage_upstream u ON u.node_id = n.id
 WHERE n.state = 'ready'
    OR n.state = 'gone' AND n.epoch > n.drained_epoch AND n.last_seen_at > now() - interval '3 minutes'
 ORDER BY n.name
"""


async def load_snapshot(
    connection: Connection, experience: Mapping[Zone, Experience] | None = None
) -> Snapshot:
    """`experience` with evictions, by provider and zone: nodes that are lost often cost more than their price."""
    started_at = time.monotonic()
    names = await _fetch(connection, "SELECT name FROM brokerage_node")
    budgeted = await _fetch(connection, "SELECT DISTINCT customer_id::text FROM brokerage_budget")
    called = await _fetch(connection, _CALLED)
    loaded = Snapshot(
        node_names=frozenset(name for (name,) in names),
        budgeted=frozenset(customer for (customer,) in budgeted),
        called=frozenset(account for (account,) in called),
        endpoints=await load_endpoints(connection),
        loaded_at=started_at,
    )
    customers: dict[str, KnownCustomer] = {}
    for row in await _fetch(connection, _KEYS):
        key = _known_key(row, customers)
        loaded.learn(row[0], key)
    for model_id, name, context, created_at, reasons, *price in await _fetch(connection, _MODELS):
        price_id, currency, prompt, completion = price
        card = ModelCard(name, context, int(created_at.timestamp()), owned_by="apex", reasoning=reasons)
        loaded.models[name, currency] = SoldModel(card, model_id, price_id, currency, prompt, completion)
    pools: dict[str, list[ReadyNode]] = {}
    for model, name, epoch, host, port, tokenizer_id, can, slots, price, silent, *more in await _fetch(
        connection, _NODES
    ):
        provider, zone, *upstream = more
        if upstream[0] is None:
            node = Node(name, epoch, host, port, tokenizer_id, _resume(can))
        elif (third_party := _third_party(name, epoch, _resume(can), *upstream)) is not None:
            node = third_party
        else:
            continue
        cost = expected_cost(float(price), hazard((experience or {}).get((provider, zone))))
        pools.setdefault(model, []).append(ReadyNode(node, slots, cost, silent))
    loaded.nodes.update({model: tuple(pool) for model, pool in pools.items()})
    return loaded


def _resume(capabilities: Sequence[str]) -> Resume:
    """A node worker of before this was reported runs an engine that names ids; others were not let in."""
    return next((way for way in Resume if way in capabilities), Resume.IDS)


@lru_cache(maxsize=1024)
def _third_party(
    name: str, epoch: int, resume: Resume, base_url: str, model: str, sealed_key: str, ca_pem: str
) -> Node | None:
    """None when its key cannot be read; said once, as long as nothing changes."""
    try:
        key = unseal(sealed_key) if sealed_key else ""
    except SecretUnreadable as error:
        logger.error("node %s is not used, its key is %s", name, error)
        return None
    return as_node(
        name=name,
        epoch=epoch,
        base_url=base_url,
        model=model,
        api_key=key,
        ca_pem=ca_pem,
        resume=resume,
    )


async def find_key(connection: Connection, digest: bytes) -> KnownKey | None:
    """The database's answer about one key, for those that are newer than the snapshot."""
    for row in await _fetch(connection, _KEYS + " AND k.key_hash = %s", [digest]):
        return _known_key(row, {})
    return None


def _known_key(row: tuple[Any, ...], customers: dict[str, KnownCustomer]) -> KnownKey:
    _, key_id, expires_at, customer_id, currency, wallet_id, *limits = row
    customer = customers.get(customer_id)
    if customer is None:
        customer = customers[customer_id] = KnownCustomer(customer_id, currency, wallet_id)
    return KnownKey(key_id, customer, expires_at, KeyLimits(*limits))


async def _fetch(
    connection: Connection, query: str, params: list[object] | None = None
) -> list[tuple[Any, ...]]:
    cursor = await connection.execute(query, params)  # type: ignore[arg-type]
    return await cursor.fetchall()
