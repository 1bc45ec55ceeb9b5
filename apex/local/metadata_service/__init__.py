"""The metadata services of five providers for the demo and the tests, many machines on one port.

    python -m apex.local.metadata_service --port N

Machine NAME has these base addresses, behind which paths, headers and payloads are the provider's:

    /NAME           AWS (IMDSv2), GCP and Azure: their paths differ
    /NAME/alibaba   Alibaba Cloud
    /NAME/tencent   Tencent Cloud

What happens to the machine is told to `_control`:

    POST /NAME/_control  {"schedule": {"action": "terminate", "in_s": 120}}
                         {"cancel": true}
                         {"rebalance": true}              AWS only
                         {"maintenance": "TERMINATE_ON_HOST_MAINTENANCE"}  GCP only; or MIGRATE_..., NONE
                         {"expire_tokens": true}          every token issued so far is void
                         {"faults": {...}}                replaces the faults; {} heals
    GET  /NAME/_control  counters, for tests

`schedule` for Azure may also say `type` (Preempt), `resources` (the machine alone) and `status`
(Scheduled); `instance.FAULTS` lists the faults.
"""

from apex.local.metadata_service.service import MetadataService

__all__ = ["MetadataService"]
