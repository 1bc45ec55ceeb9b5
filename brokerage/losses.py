"""What evictions and failures cost the platform, by provider: the figures for a claim, and for placement."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from django.db import connection

# At the sale price of a prompt token of the answer's model: what the same work would have earned.
_BY_PROVIDER = """
SELECT coalesce(n.provider, 'unknown'), coalesce(n.zone, ''), u.currency, count(*),
       count(DISTINCT l.usage_id), sum(l.lost_tokens), round(sum(l.lost_tokens * p.prompt_rate), 9)
  FROM brokerage_legcost l
  JOIN usage_event u ON u.request_id = l.usage_id
  JOIN brokerage_modelprice p ON p.id = u.price_id
  LEFT JOIN brokerage_node n ON n.name = l.lost_to
 WHERE l.lost_tokens > 0 AND u.finished_at > now() - make_interval(secs => %s)
 GROUP BY 1, 2, 3
 ORDER BY 7 DESC, 1, 2
"""


@dataclass(frozen=True, slots=True)
class ProviderLoss:
    provider: str
    zone: str
    currency: str
    legs: int
    answers: int
    tokens: int
    value: Decimal


def losses_by_provider(period: timedelta) -> list[ProviderLoss]:
    """Of answers that ended within `period`, the greatest loss first. Charged to no customer."""
    with connection.cursor() as cursor:
        cursor.execute(_BY_PROVIDER, [period.total_seconds()])
        return [ProviderLoss(*row) for row in cursor.fetchall()]
