"""The back office of the brokerage. Every write goes through a service, so it is audited like any other."""

from brokerage.admin.budgets import BudgetAdmin
from brokerage.admin.catalogue import ModelPriceAdmin, ServedModelAdmin
from brokerage.admin.customers import APIKeyAdmin, CustomerAdmin, MemberAdmin, PilotApplicationAdmin
from brokerage.admin.fleet import NodeAdmin
from brokerage.admin.ports import SteeredPortAdmin
from brokerage.admin.steering import EvictionNoticeAdmin, RerouteAdmin
from brokerage.admin.topping_up import LowBalanceNoticeAdmin, LowBalanceRuleAdmin, PreparedTopUpAdmin
from brokerage.admin.upstreams import UpstreamAdmin
from brokerage.admin.usage import LegCostAdmin, UsageEventAdmin

__all__ = [
    "APIKeyAdmin",
    "BudgetAdmin",
    "CustomerAdmin",
    "EvictionNoticeAdmin",
    "LegCostAdmin",
    "LowBalanceNoticeAdmin",
    "LowBalanceRuleAdmin",
    "MemberAdmin",
    "ModelPriceAdmin",
    "NodeAdmin",
    "PilotApplicationAdmin",
    "PreparedTopUpAdmin",
    "RerouteAdmin",
    "ServedModelAdmin",
    "SteeredPortAdmin",
    "UpstreamAdmin",
    "UsageEventAdmin",
]
