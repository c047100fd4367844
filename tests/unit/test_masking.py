"""Hiding passwords in texts that people will see."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_dbpartition.masking import mask_secrets

SECRETS = [
    "postgresql://u:s3cret@host/db",
    "postgresql+psycopg2://u:s3cret@host:5432/db?sslmode=require",
    "postgres://:s3cret@host/db",
    "mysql://root:s3cret@[::1]:3306/",
    "could not connect to postgresql://u:s3cret@host/db: timeout",
    "postgresql//u:s3cret@host/db",
    "password=s3cret host=h",
    "host=h PASSWORD = s3cret",
    "passwd: s3cret, user: u",
    "pwd='s3cret with spaces'",
    'secret="s3cret"',
    "https://api/?token=s3cret&x=1",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_password_is_hidden_wherever_it_stands(text: str) -> None:
    masked = mask_secrets(text)
    assert "s3cret" not in masked
    assert "***" in masked


def test_what_is_around_a_password_stays_readable() -> None:
    assert mask_secrets("postgresql://u:s3cret@host:5432/db?x=1") == "postgresql://u:***@host:5432/db?x=1"
    assert mask_secrets("host=h password=s3cret user=u") == "host=h password=*** user=u"


@pytest.mark.parametrize("password", ["p@ss", "a/b", "a:b", "p@a/b:c@d", "ü", "%40", "p#q?r"])
def test_a_password_may_hold_what_urls_are_made_of(password: str) -> None:
    assert mask_secrets(f"postgresql://u:{password}@host/db") == "postgresql://u:***@host/db"


@given(st.text(string.ascii_letters + string.digits + "!$%^*()_-+=@/:#?.~", min_size=1))
def test_no_password_without_blanks_survives(password: str) -> None:
    assert mask_secrets(f"error at mysql://user:{password}@host/db") == "error at mysql://user:***@host/db"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no secret here",
        "postgresql://host/db",
        "postgresql://user@host/db",
        "12:30:45 node a@b is late",
        "the password is wrong",
        "Access denied for user 'root'@'localhost' (using password: YES)",
        "s3://bucket/key:with:colons",
    ],
)
def test_other_text_is_left_alone(text: str) -> None:
    assert mask_secrets(text) == text


def test_masking_twice_changes_nothing_more() -> None:
    for text in SECRETS:
        assert mask_secrets(mask_secrets(text)) == mask_secrets(text)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["a", "a.b-", "x://u:", "password=", "://", "x=//y:"])
def test_a_long_text_without_blanks_is_no_trap(unit: str) -> None:
    """Unbounded, the pattern took minutes for this."""
    mask_secrets(unit * (200_000 // len(unit)))
