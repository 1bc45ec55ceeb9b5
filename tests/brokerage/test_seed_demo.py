"""manage.py seed_demo: may be repeated, remembers what it printed."""

import io
import json
import stat
from decimal import Decimal

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import override_settings

from brokerage.management.commands.seed_demo import CREDENTIALS_FILE
from brokerage.models import APIKey, Customer, ModelPrice, Node, ServedModel
from brokerage.services.keys import parse_key

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def var_dir(tmp_path):
    with override_settings(VAR_DIR=tmp_path):
        yield tmp_path


def seed(*arguments: str) -> dict:
    out = io.StringIO()
    call_command("seed_demo", "--json", "--force", *arguments, stdout=out)
    return json.loads(out.getvalue())


def active_keys() -> list[APIKey]:
    return list(APIKey.objects.filter(revoked_at__isnull=True))


def test_it_works(var_dir, client):
    made = seed()
    assert ServedModel.objects.get().name == made["model"] == "gemma-3-270m"
    price = ModelPrice.objects.get()
    assert (price.prompt_rate, price.completion_rate) == (Decimal("2e-7"), Decimal("6e-7"))
    assert list(Node.objects.values_list("name", flat=True)) == made["nodes"] == ["node-a", "node-b"]
    assert client.login(username=made["admin"]["email"], password=made["admin"]["password"])
    assert client.get("/admin/").status_code == 200
    assert client.login(username=made["pilot"]["email"], password=made["pilot"]["password"])
    (key,) = active_keys()
    assert bytes(key.key_hash) == parse_key(made["pilot"]["api_key"]).digest
    assert str(key.customer_id) == made["pilot"]["customer_id"]
    assert stat.S_IMODE((var_dir / CREDENTIALS_FILE).stat().st_mode) == 0o600


def test_again_changes_nothing_and_prints_the_same():
    first = seed()
    assert seed() == first
    assert (
        Customer.objects.count(),
        User.objects.count(),
        ModelPrice.objects.count(),
        Node.objects.count(),
    ) == (1, 2, 1, 2)
    assert len(active_keys()) == 1


def test_a_lost_file_means_new_secrets_and_the_old_ones_end(var_dir):
    first = seed()
    (var_dir / CREDENTIALS_FILE).unlink()
    second = seed()
    assert second["pilot"]["api_key"] != first["pilot"]["api_key"]
    assert second["pilot"]["customer_id"] == first["pilot"]["customer_id"]
    assert [key.last4 for key in active_keys()] == [second["pilot"]["api_key"][-4:]]
    assert not User.objects.get(username="pilot@acme.example").check_password(first["pilot"]["password"])


def test_a_lost_database_keeps_the_passwords(var_dir):
    (var_dir / CREDENTIALS_FILE).write_text(
        json.dumps({"admin": {"password": "kept-admin-secret"}, "pilot": {"password": "kept-pilot-secret"}})
    )
    assert seed()["admin"]["password"] == "kept-admin-secret"
    assert User.objects.get(username="pilot@acme.example").check_password("kept-pilot-secret")


def test_a_damaged_file_is_named(var_dir):
    (var_dir / CREDENTIALS_FILE).write_text("{")
    with pytest.raises(CommandError, match=CREDENTIALS_FILE):
        seed()


def test_a_named_database_is_left_alone_without_force():
    with pytest.raises(CommandError, match="--force"):
        call_command("seed_demo")
    assert not User.objects.exists()


@pytest.mark.parametrize(
    "arguments",
    [["--context", "0"], ["--context", "many"], ["--prompt-price", "-1"], ["--prompt-price", "NaN"]],
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(CommandError, match=arguments[0]):
        seed(*arguments)
