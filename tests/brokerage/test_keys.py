"""API keys: shape, checksum, and what the database keeps of them."""

import hashlib
import string

import pytest
from django.core.exceptions import ValidationError
from hypothesis import given
from hypothesis import strategies as st

from brokerage.models import APIKey
from brokerage.services.keys import BASE62, issue_key, make_key, parse_key, revoke_key
from tests.brokerage.factories import audit_actions, make_customer


def test_a_made_key_parses():
    key = make_key(APIKey.Mode.TEST)
    parsed = parse_key(key)
    assert key.startswith("apx_test_")
    assert parsed is not None
    assert (parsed.mode, parsed.digest, parsed.last4) == (
        "test",
        hashlib.sha256(key.encode()).digest(),
        key[-4:],
    )


def test_keys_have_190_random_bits():
    random_part = make_key(APIKey.Mode.LIVE).removeprefix("apx_live_")[:-6]
    assert len(BASE62) ** len(random_part) > 2**190
    assert set(BASE62) == set(string.ascii_letters + string.digits)


@given(position=st.integers(0, 46), replacement=st.sampled_from(BASE62 + " _-é"))
def test_any_one_wrong_character_is_noticed_without_a_database(position, replacement):
    key = make_key(APIKey.Mode.LIVE)
    mistyped = key[:position] + replacement + key[position + 1 :]
    assert (parse_key(mistyped) is None) == (mistyped != key)


@pytest.mark.parametrize(
    "mangle", [str.upper, lambda key: key[:-1], lambda key: key + "0", lambda key: key + "\n", lambda _: ""]
)
def test_mangled_keys_are_refused(mangle):
    assert parse_key(mangle(make_key(APIKey.Mode.LIVE))) is None


@pytest.mark.django_db
def test_only_the_hash_is_stored():
    issued = issue_key(customer=make_customer(), name=" laptop ", actor=None)
    stored = APIKey.objects.get(pk=issued.key.pk)
    assert bytes(stored.key_hash) == hashlib.sha256(issued.plaintext.encode()).digest()
    assert stored.name == "laptop"
    assert issued.plaintext not in repr(issued)
    assert "api_key.issued" in audit_actions()


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["", "   ", "x" * 101])
def test_a_bad_name_is_refused_by_field(name):
    with pytest.raises(ValidationError) as caught:
        issue_key(customer=make_customer(), name=name, actor=None)
    assert "name" in caught.value.message_dict
    assert not APIKey.objects.exists()


@pytest.mark.django_db
def test_revoking_twice_is_one_revocation():
    key = issue_key(customer=make_customer(), name="laptop", actor=None).key
    assert revoke_key(key=key, actor=None)
    key.refresh_from_db()
    first = key.revoked_at
    assert first is not None
    assert not revoke_key(key=key, actor=None)
    key.refresh_from_db()
    assert key.revoked_at == first
    assert audit_actions().count("api_key.revoked") == 1
