"""What is read from the environment, and how."""

from pathlib import Path

import pytest

from core import environment


def test_cache_is_the_own_folder_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    assert environment.cache_directory() == Path("/xdg/outrider")
    monkeypatch.setenv("OUTRIDER_CACHE", "/own")
    assert environment.cache_directory() == Path("/own")


def test_ticket_keys_are_a_list_and_blank_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TICKET_KEYS", "aa, bb,,")
    assert environment.ticket_keys() == ("aa", "bb")
    monkeypatch.setenv("OUTRIDER_TICKET_KEYS", " ")
    assert environment.ticket_keys() == ()
    monkeypatch.setenv("OUTRIDER_TOKEN", "  ")
    assert environment.bearer_token() is None


def test_secrets_can_be_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TOKEN", "secret")
    environment.remove_secrets()
    assert environment.bearer_token() is None
    assert "OUTRIDER_TOKEN" not in environment.child_environment({})


def test_threads_spin_briefly_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert environment.compute_thread_variables(2)["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    variables = environment.compute_thread_variables(2)
    assert (variables["GOMP_SPINCOUNT"], variables["OMP_NUM_THREADS"]) == ("5", "2")
