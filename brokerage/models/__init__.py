from brokerage.models.budgets import Budget, BudgetedHold
from brokerage.models.catalogue import ModelPrice, ServedModel
from brokerage.models.customers import APIKey, Customer, Member, PilotApplication
from brokerage.models.fleet import EvictionNotice, Node, Reroute
from brokerage.models.kept import KeptAnswer
from brokerage.models.leases import LeaseCall
from brokerage.models.ports import SteeredPort
from brokerage.models.projects import Project
from brokerage.models.topping_up import LowBalanceNotice, LowBalanceRule, PreparedTopUp
from brokerage.models.upstreams import Upstream
from brokerage.models.usage import LegCost, UsageEvent

__all__ = [
    "APIKey",
    "Budget",
    "BudgetedHold",
    "Customer",
    "EvictionNotice",
    "KeptAnswer",
    "LeaseCall",
    "LegCost",
    "LowBalanceNotice",
    "LowBalanceRule",
    "Member",
    "ModelPrice",
    "Node",
    "PilotApplication",
    "PreparedTopUp",
    "Project",
    "Reroute",
    "ServedModel",
    "SteeredPort",
    "Upstream",
    "UsageEvent",
]
