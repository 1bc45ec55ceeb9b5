"""How often nodes are evicted, by provider and zone, and what that makes of their price."""

from __future__ import annotations

from dataclasses import dataclass

from django.conf import settings

from brokerage.admission.database import Connection

REFRESH_S = 60.0
# Weight of the prior: it counts like so many node-hours of experience.
PRIOR_HOURS = 24.0
_USEFUL_SHARE_MIN = 0.1

Zone = tuple[str, str]  # provider, zone

# A week of experience. A notice counts once for each incarnation of a node; what
# was taken back is no eviction. Hours are those in which the node was known, so a node that was gone for long
# makes its zone look a little better than it is.
_EXPERIENCE = """
SELECT n.provider, n.zone, coalesce(sum(e.evictions), 0)::int,
       sum(greatest(0, extract(epoch FROM coalesce(n.last_seen_at, n.created_at)
                               - greatest(n.created_at, now() - interval '7 days'))))::float / 3600
  FROM brokerage_node n
  LEFT JOIN (SELECT node_id, count(*) FILTER (WHERE real) AS evictions
               FROM (SELECT node_id, epoch, bool_and(action <> 'cancel') AS real FROM brokerage_evictionnotice
                      WHERE created_at > now() - interval '7 days' GROUP BY node_id, epoch) i
              GROUP BY node_id) e ON e.node_id = n.id
 GROUP BY n.provider, n.zone
"""


@dataclass(frozen=True, slots=True)
class Experience:
    evictions: int
    node_hours: float


def hazard(experience: Experience | None) -> float:
    """Evictions per node-hour to expect: what was seen, drawn towards the prior while little was seen."""
    prior = settings.EVICTIONS_PER_HOUR_PRIOR
    seen = experience or Experience(0, 0.0)
    return (seen.evictions + prior * PRIOR_HOURS) / (seen.node_hours + PRIOR_HOURS)


def expected_cost(hourly_rate: float, evictions_per_hour: float) -> float:
    """USD per useful hour: of every hour, what evictions cost in work that must be done again is lost."""
    lost = evictions_per_hour * settings.EVICTION_LOST_MINUTES / 60
    return hourly_rate / max(_USEFUL_SHARE_MIN, 1 - lost)


async def load_experience(connection: Connection) -> dict[Zone, Experience]:
    cursor = await connection.execute(_EXPERIENCE)
    return {
        (provider, zone): Experience(evictions, hours)
        for provider, zone, evictions, hours in await cursor.fetchall()
    }
