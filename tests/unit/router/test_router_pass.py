"""The drafter `pass` is for deployments whose target is pipelined."""

import pytest

from core.errors import FailedPrecondition
from router.views import Offer
from tests.unit.router.test_router_validate import changed, check, speculation


def test_pass_is_refused_with_the_setting_where_no_worker_hosts_it() -> None:
    with pytest.raises(FailedPrecondition, match=r"engine\.pipeline_stages=2") as refused:
        check(changed(speculation(drafter="pass")))
    assert refused.value.field == "speculation.drafter"


def test_pass_is_taken_where_a_worker_hosts_it_or_none_is_known() -> None:
    request = changed(speculation(drafter="pass", draft_length=4))
    for offer in (Offer(frozenset({"none", "pass"}), 16), Offer(frozenset(), 0, known=False)):
        assert check(request, offer).speculation.drafter == "pass"
