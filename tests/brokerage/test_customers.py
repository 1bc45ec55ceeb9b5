"""From the application to the customer."""

import re

import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.core.exceptions import ValidationError

from brokerage.models import APIKey, Customer, Member, PilotApplication
from brokerage.services import customers
from brokerage.services.customers import AlreadyDecided, add_member, apply_for_pilot, approve_application
from brokerage.services.keys import parse_key
from ledger.selectors import wallet
from tests.brokerage.factories import audit_actions, in_threads, make_customer, make_staff


def apply(**changes) -> PilotApplication:
    form = {
        "name": "Ada Byron",
        "email": "Ada@Example.com",
        "company": "Engines",
        "use_case": "Tables of numbers",
    }
    return apply_for_pilot(**(form | changes))


@pytest.mark.django_db
def test_apply_works():
    application = apply()
    assert (application.email, application.state) == ("ada@example.com", "new")
    assert "pilot.applied" in audit_actions()


@pytest.mark.django_db
def test_a_double_click_is_one_application():
    assert apply() == apply(email=" ada@example.COM ")
    assert audit_actions().count("pilot.applied") == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("email", "no address"),
        ("email", ""),
        ("name", " "),
        ("company", "x" * 201),
        ("use_case", ""),
        ("email", "a" * 150 + "@b.co"),
    ],
)
def test_bad_input_is_named_by_field(field, value):
    with pytest.raises(ValidationError) as caught:
        apply(**{field: value})
    assert list(caught.value.message_dict) == [field]
    assert not PilotApplication.objects.exists()


@pytest.mark.django_db
def test_approval_makes_the_customer_complete(django_capture_on_commit_callbacks, client):
    application, clerk = apply(), make_staff()
    with django_capture_on_commit_callbacks(execute=True):
        approval = approve_application(application=application, staff=clerk)
    application.refresh_from_db()
    assert (application.state, application.customer, application.decided_by) == (
        "approved",
        approval.customer,
        clerk,
    )
    member = Member.objects.select_related("user").get(customer=approval.customer)
    assert (member.user, member.role, member.user.email) == (approval.user, "owner", "ada@example.com")
    assert member.user.get_full_name() == "Ada Byron"
    assert wallet(approval.customer.wallet_code).currency == "USD"
    parsed = parse_key(approval.api_key_plaintext)
    assert parsed is not None
    assert bytes(APIKey.objects.get(customer=approval.customer).key_hash) == parsed.digest
    assert approval.api_key_plaintext not in repr(approval)
    assert {"pilot.approved", "api_key.issued"} <= set(audit_actions())


@pytest.mark.django_db
def test_the_invitation_sets_a_password_once(django_capture_on_commit_callbacks, client):
    with django_capture_on_commit_callbacks(execute=True):
        approval = approve_application(application=apply(), staff=make_staff())
    (message,) = mail.outbox
    assert message.to == ["ada@example.com"]
    assert approval.invitation.url in message.body
    path = re.sub(r"^https?://[^/]+", "", approval.invitation.url)
    form = client.get(path, follow=True)
    assert form.status_code == 200
    password = {"new_password1": "correct horse battery", "new_password2": "correct horse battery"}
    client.post(form.redirect_chain[-1][0], password)
    assert User.objects.get(pk=approval.user.pk).check_password("correct horse battery")


@pytest.mark.django_db
def test_approving_twice_makes_one_customer():
    application, clerk = apply(), make_staff()
    approve_application(application=application, staff=clerk)
    with pytest.raises(AlreadyDecided, match="approved already"):
        approve_application(application=application, staff=clerk)
    with pytest.raises(AlreadyDecided):
        customers.decline_application(application=application, staff=clerk)
    assert Customer.objects.count() == 1


@pytest.mark.django_db
def test_a_declined_applicant_may_apply_again():
    first = apply()
    customers.decline_application(application=first, staff=make_staff())
    second = apply()
    assert second.pk != first.pk
    assert "pilot.declined" in audit_actions()


def test_of_two_clerks_at_once_one_approves(fresh_database):
    application, clerk = apply(), make_staff()

    def approve(_: int) -> str:
        try:
            approve_application(application=PilotApplication.objects.get(pk=application.pk), staff=clerk)
        except AlreadyDecided:
            return "late"
        return "first"

    assert sorted(in_threads(6, approve)) == ["first"] + ["late"] * 5
    assert (Customer.objects.count(), APIKey.objects.count(), User.objects.count()) == (1, 1, 2)


@pytest.mark.django_db
def test_members_are_added_once_and_known_people_keep_their_password(django_capture_on_commit_callbacks):
    customer, clerk = make_customer(), make_staff()
    known = User.objects.create_user("bob@example.com", "bob@example.com", "secret horse staple")
    with django_capture_on_commit_callbacks(execute=True):
        member = add_member(customer=customer, email="Bob@example.com", actor=clerk)
        assert (
            add_member(customer=customer, email="bob@example.com", actor=clerk, role=Member.Role.OWNER)
            == member
        )
    assert (member.user, member.role) == (known, "member")
    assert len(mail.outbox) == 1
    assert "Sign in" in mail.outbox[0].body
    assert User.objects.get(pk=known.pk).check_password("secret horse staple")
    assert audit_actions().count("member.added") == 1


@pytest.mark.django_db
def test_a_broken_mail_server_does_not_undo_the_approval(django_capture_on_commit_callbacks, settings):
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1  # nothing listens there
    with django_capture_on_commit_callbacks(execute=True):
        approve_application(application=apply(), staff=make_staff())
    assert Customer.objects.count() == 1


@pytest.mark.django_db
def test_suspension_is_taken_back():
    customer, clerk = make_customer(), make_staff()
    assert customers.suspend_customer(customer=customer, actor=clerk)
    assert not customers.suspend_customer(customer=customer, actor=clerk)
    assert customers.reinstate_customer(customer=customer, actor=clerk)
    customer.refresh_from_db()
    assert customer.suspended_at is None
    assert {"customer.suspended", "customer.reinstated"} <= set(audit_actions())
