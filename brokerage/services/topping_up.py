"""Watches wallets that run low: mails the owners once per crossing, and prepares purchases for them to approve.

Nothing here charges anybody: a prepared purchase is an order at PayPal that the payer has yet to approve
(docs/decisions/0022). Every step may run twice or at once; partial unique indexes and conditional updates decide.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.mail import send_mail
from django.db import transaction
from django.db.models import Q, Sum
from django.db.models.functions import Now
from django.urls import reverse
from django.utils import timezone
from djmoney.money import Money

from brokerage.models import Customer, LowBalanceNotice, LowBalanceRule, Member, PreparedTopUp
from brokerage.services.audit import record
from ledger.models import Settlement, TopUp
from ledger.paypal.gateway import GatewayRefused, GatewayUnavailable
from ledger.paypal.orders import start_top_up
from ledger.selectors import wallets

logger = logging.getLogger(__name__)

ACTOR = "system:low-balance"
# Longer than a mail server may take to answer; a worker that died while mailing is relieved after this.
CLAIM = timedelta(minutes=5)


def is_owner(*, customer: Customer, user: User) -> bool:
    return Member.objects.filter(customer=customer, user=user, role=Member.Role.OWNER).exists()


def open_notice(customer: Customer) -> LowBalanceNotice | None:
    """There is one while the credit is below the threshold, give or take the period of the watch."""
    return LowBalanceNotice.objects.filter(customer=customer, closed_at__isnull=True).first()


def awaiting_approval(customer: Customer) -> PreparedTopUp | None:
    """The prepared purchase that its payer can approve now."""
    mine = PreparedTopUp.objects.filter(customer=customer, closed_at__isnull=True)
    return mine.filter(top_up__state=TopUp.State.APPROVING).select_related("top_up").first()


@transaction.atomic
def set_low_balance_rule(
    *,
    customer: Customer,
    actor: User | None,
    notice_below: Decimal | None,
    top_up_below: Decimal | None,
    top_up_amount: Decimal | None,
    monthly_cap: Decimal | None,
) -> LowBalanceRule:
    """In the customer's currency; None is off. Raises ValidationError, keyed by field."""
    asked = {"top_up_below": top_up_below, "top_up_amount": top_up_amount, "monthly_cap": monthly_cap}
    errors = {
        name: "Must be above zero."
        for name, value in {"notice_below": notice_below, **asked}.items()
        if value is not None and value <= 0
    }
    if any(value is not None for value in asked.values()):
        errors |= {name: "Needed with the other two." for name, value in asked.items() if value is None}
    if top_up_amount is not None and monthly_cap is not None and monthly_cap < top_up_amount:
        errors.setdefault("monthly_cap", "Must be at least the amount of one purchase.")
    if errors:
        raise ValidationError(errors)
    rule, _ = LowBalanceRule.objects.update_or_create(
        customer=customer, defaults={"notice_below": notice_below, **asked}
    )
    record(
        "low_balance_rule.set",
        subject=rule,
        actor=actor,
        **{
            name: value if value is None else str(value)
            for name, value in {"notice_below": notice_below, **asked}.items()
        },
    )
    return rule


def watch_wallets() -> None:
    """Opens and closes notices and prepared purchases, then does what is open. One look at all balances."""
    rules = list(LowBalanceRule.objects.select_related("customer"))
    balances = wallets([rule.customer.wallet_code for rule in rules])
    for rule in rules:
        available = balances[rule.customer.wallet_code].available
        _notice(rule, available)
        _prepare(rule, available)
    for prepared in PreparedTopUp.objects.filter(closed_at__isnull=True, top_up__isnull=True):
        place_order(prepared)
    _mail_all()


def _notice(rule: LowBalanceRule, available: Decimal) -> None:
    if rule.notice_below is None or available >= rule.notice_below:
        LowBalanceNotice.objects.filter(customer=rule.customer, closed_at__isnull=True).update(
            closed_at=Now()
        )
        return
    # The partial unique index lets one of many workers in; the others change nothing.
    LowBalanceNotice.objects.bulk_create(
        [LowBalanceNotice(customer=rule.customer, threshold=rule.notice_below, available=available)],
        ignore_conflicts=True,
    )


def _prepare(rule: LowBalanceRule, available: Decimal) -> None:
    mine = PreparedTopUp.objects.filter(customer=rule.customer, closed_at__isnull=True)
    below = rule.top_up_below is not None and available < rule.top_up_below
    over = Q(top_up__state=TopUp.State.SETTLED)
    if not below:
        over |= Q(top_up__state=TopUp.State.FAILED) | Q(top_up__isnull=True)
    # A subquery: an update takes no condition over a join.
    PreparedTopUp.objects.filter(pk__in=mine.filter(over).values("pk")).update(closed_at=Now())
    if not below or rule.customer.suspended_at is not None:
        return
    assert rule.top_up_amount is not None
    assert rule.monthly_cap is not None
    if settled_this_month(rule.customer) + rule.top_up_amount > rule.monthly_cap:
        return
    with transaction.atomic():
        intent = PreparedTopUp(customer=rule.customer, amount=rule.top_up_amount)
        PreparedTopUp.objects.bulk_create([intent], ignore_conflicts=True)
        made = PreparedTopUp.objects.filter(key=intent.key).first()
        if made is not None:
            record("top_up.prepared", subject=made, actor=ACTOR, amount=str(made.amount))


def month_start(customer: Customer, now: datetime) -> datetime:
    """The first midnight of the month on the customer's clock, in UTC."""
    local = now.astimezone(ZoneInfo(customer.time_zone))
    return local.replace(day=1, hour=0, minute=0, second=0, microsecond=0, fold=0).astimezone(UTC)


def settled_this_month(customer: Customer, now: datetime | None = None) -> Decimal:
    """What was really paid of prepared purchases, in the customer's currency and calendar month."""
    return Settlement.objects.filter(
        kind="capture",
        top_up__prepared__customer=customer,
        created_at__gte=month_start(customer, now or timezone.now()),
    ).aggregate(total=Sum("gross", default=Decimal(0)))["total"]


def place_order(prepared: PreparedTopUp) -> None:
    """Under the key in the row: however often this is repeated, there is one purchase. No transaction may be open."""
    key = f"prepared:{prepared.key}"
    try:
        start_top_up(
            wallet_code=prepared.customer.wallet_code,
            amount=Money(prepared.amount, prepared.customer.currency),
            actor=ACTOR,
            idempotency_key=key,
            return_url=settings.PUBLIC_URL + reverse("portal:credits-return"),
            cancel_url=settings.PUBLIC_URL + reverse("portal:credits-cancel"),
        )
    except GatewayUnavailable:
        logger.warning("%s waits: PayPal does not answer", prepared)
        return
    except ValueError as error:
        # An amount that this rail cannot take: one customer's rule must not stop the others'.
        logger.error("%s cannot be ordered: %s", prepared, error)
        return
    except GatewayRefused as refusal:
        # Kept as failed: asking again for the same would be refused again.
        logger.warning("%s refused: %s", prepared, refusal.issue)
    PreparedTopUp.objects.filter(pk=prepared.pk).update(top_up=TopUp.objects.get(idempotency_key=key))


def _mail_all() -> None:
    for notice in LowBalanceNotice.objects.filter(closed_at__isnull=True, mailed_at__isnull=True):
        currency = notice.customer.currency
        _mail(
            notice,
            subject="Your Apex credits run low",
            text=f"{_amount(notice.available)} {currency} are left, less than the {_amount(notice.threshold)} {currency}"
            f" below which you asked to be told.\n\nBuy more: {settings.PUBLIC_URL}{reverse('portal:credits')}\n",
        )
    waiting = PreparedTopUp.objects.filter(
        closed_at__isnull=True, mailed_at__isnull=True, top_up__state=TopUp.State.APPROVING
    )
    for prepared in waiting.select_related("customer", "top_up"):
        assert prepared.top_up is not None
        _mail(
            prepared,
            subject="A top-up waits for your approval",
            text=f"Your Apex credits run low. A purchase of {_amount(prepared.amount)} {prepared.customer.currency} is"
            f" ready; nothing is charged until you approve it at PayPal:\n\n{prepared.top_up.approve_url}\n",
        )


def _mail(row: LowBalanceNotice | PreparedTopUp, *, subject: str, text: str) -> None:
    """Claimed first, so that one of many workers mails; a mail that failed is tried again by the next run."""
    rows = type(row)._default_manager.filter(pk=row.pk, mailed_at__isnull=True)
    free = Q(claimed_until__isnull=True) | Q(claimed_until__lt=Now())
    if not rows.filter(free).update(claimed_until=Now() + CLAIM):
        return
    owners = Member.objects.filter(customer=row.customer, role=Member.Role.OWNER, user__is_active=True)
    addresses = list(owners.exclude(user__email="").values_list("user__email", flat=True))
    try:
        send_mail(subject, f"Hello,\n\n{text}", None, addresses)
    except OSError as error:  # what smtplib and sockets raise
        logger.warning("mail about the %s failed: %s", row, type(error).__name__)
        rows.update(claimed_until=None)
        return
    rows.update(mailed_at=Now())


def _amount(value: Decimal) -> str:
    return f"{value:.2f}"
