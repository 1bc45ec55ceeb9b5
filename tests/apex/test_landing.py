"""The public pages: landing, application, sign-in, passwords."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.urls import reverse

from brokerage.models import PilotApplication

pytestmark = pytest.mark.django_db

APPLICATION = {"name": "Ada", "email": "ada@example.com", "company": "Engines", "use_case": "Proofs"}


@pytest.fixture(autouse=True)
def empty_limits(redis_client):
    """Every test starts with full buckets."""


@pytest.fixture
def ada() -> User:
    return User.objects.create_user("ada@example.com", "ada@example.com", "correct horse 7")


def test_landing_says_what_apex_is(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "survive evictions" in page.text
    assert 'hx-get="/status/strip/"' in page.text


def test_application_is_stored_and_thanked_for(client):
    assert client.post("/", APPLICATION, follow=True).redirect_chain == [("/apply/thanks/", 302)]
    assert PilotApplication.objects.get().company == "Engines"


def test_second_application_of_an_address_gets_the_same_page_and_makes_no_second_row(client):
    first = client.post("/", APPLICATION, follow=True)
    second = client.post("/", APPLICATION | {"email": "ADA@example.com"}, follow=True)
    assert (second.status_code, second.redirect_chain) == (first.status_code, first.redirect_chain)
    assert PilotApplication.objects.count() == 1


def test_bad_application_shows_each_error_beside_its_field(client):
    page = client.post("/", APPLICATION | {"email": "nonsense", "company": ""})
    assert page.status_code == 422
    for field in ("email", "company"):
        assert re.search(rf'id="id_{field}"[^>]*aria-describedby="id_{field}_error"', page.text) or re.search(
            rf'aria-describedby="id_{field}_error"[^>]*id="id_{field}"', page.text
        )
        assert f'id="id_{field}_error"' in page.text
    assert PilotApplication.objects.count() == 0


def test_a_program_that_fills_in_the_hidden_field_is_thanked_and_forgotten(client):
    assert client.post("/", APPLICATION | {"website": "https://spam.example"}).status_code == 302
    assert PilotApplication.objects.count() == 0


def test_applications_from_one_address_are_limited(client):
    codes = [client.post("/", APPLICATION | {"email": f"a{n}@example.com"}).status_code for n in range(11)]
    assert codes == [302] * 10 + [429]


@pytest.mark.parametrize("name", ["ada@example.com", "ADA@example.com"])
def test_sign_in_by_address(client, ada, name):
    answer = client.post("/sign-in/", {"username": name, "password": "correct horse 7"})
    assert (answer.status_code, answer.url) == (302, "/portal/")


def test_sign_in_by_user_name(client):
    User.objects.create_user("grace", "grace@example.com", "correct horse 7")
    assert client.post("/sign-in/", {"username": "grace", "password": "correct horse 7"}).status_code == 302


def test_wrong_password_and_unknown_account_look_the_same(client, ada):
    wrong = client.post("/sign-in/", {"username": "ada@example.com", "password": "x"})
    unknown = client.post("/sign-in/", {"username": "bob@example.com", "password": "x"})
    assert wrong.status_code == unknown.status_code == 422
    strip = re.compile(r'value="[^"]*"|Request \w+')
    assert strip.sub("", wrong.text) == strip.sub("", unknown.text)


def test_guessing_at_an_account_is_slowed_down_even_with_the_right_password(client, ada):
    for _ in range(10):
        client.post("/sign-in/", {"username": "ada@example.com", "password": "guess"})
    answer = client.post("/sign-in/", {"username": "ada@example.com", "password": "correct horse 7"})
    assert answer.status_code == 429
    assert int(answer.headers["Retry-After"]) >= 1
    assert "_auth_user_id" not in client.session


def test_sign_in_sends_nobody_to_another_site(client, ada):
    answer = client.post(
        "/sign-in/",
        {"username": ada.username, "password": "correct horse 7", "next": "https://evil.example/"},
    )
    assert answer.url == "/portal/"


def test_forgotten_password_link_sets_a_new_one_and_works_once(client, ada):
    page = client.post("/password/forgot/", {"email": "ada@example.com"}, follow=True)
    link = re.search(r"http\S+", mail.outbox[0].body)[0]
    form_address = client.get(link, follow=True).redirect_chain[-1][0]
    answer = client.post(
        form_address, {"new_password1": "battery staple 9", "new_password2": "battery staple 9"}
    )
    assert answer.url == "/portal/"
    assert "_auth_user_id" in client.session
    client.logout()
    assert "used or is too old" in client.get(link, follow=True).text
    assert "on its way" in page.text


def test_forgotten_password_tells_nobody_whether_there_is_an_account(client, ada):
    known = client.post("/password/forgot/", {"email": "ada@example.com"}, follow=True)
    unknown = client.post("/password/forgot/", {"email": "nobody@example.com"}, follow=True)
    assert known.text == unknown.text
    assert [m.to for m in mail.outbox] == [["ada@example.com"]]


def test_sign_out_needs_a_post(client, ada):
    client.force_login(ada)
    assert client.get(reverse("sign-out")).status_code == 405
    assert client.post(reverse("sign-out")).url == "/"


@pytest.mark.parametrize("path", ["/nowhere", "/portal/nowhere"])
def test_unknown_address_gets_our_page(client, path):
    page = client.get(path)
    assert page.status_code == 404
    assert "There is nothing here" in page.text
