"""Turns usage into money: claim, rate, post, mark, all in one transaction.

A worker that dies anywhere leaves nothing behind: the claim is a row lock, and journals and marks
commit together. Two more guards stand behind that: the ledger takes each request id once, and a usage
row is marked only while it is unmarked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from django.db import connection, transaction
from django.db.models import Q
from django.db.models.functions import Now

from brokerage.models import UsageEvent
from brokerage.services.rating import rate_answer
from ledger.errors import InsufficientFunds
from ledger.services import post_journals

logger = logging.getLogger(__name__)

JOURNAL_SCOPE = "usage"
REVENUE_ACCOUNT = "usage_revenue"
# A wallet that cannot pay is asked again after this: the customer may have bought credit.
RETRY_UNPAID = timedelta(minutes=5)
