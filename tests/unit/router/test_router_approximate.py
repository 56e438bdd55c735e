"""Drafters that change the distribution are refused at the door unless the request allows them."""

import pytest

from core.errors import InvalidArgument
from core.records import APPROXIMATE_DRAFTERS, SpeculationParams
from outrider.v1 import common_pb2
from router.views import Offer
from tests.unit.router.test_router_validate import changed, check, speculation

OFFER = Offer(APPROXIMATE_DRAFTERS | {"none", "ngram"}, max_draft_length=16)


@pytest.mark.parametrize("drafter", sorted(APPROXIMATE_DRAFTERS))
def test_an_approximate_drafter_needs_leave_and_brings_its_own_rule(drafter: str) -> None:
    with pytest.raises(InvalidArgument, match="set allow_approximate") as refused:
        check(changed(speculation(drafter=drafter)), OFFER)
    assert refused.value.field == "speculation.drafter"
    for mode in (common_pb2.VERIFICATION_REJECTION, common_pb2.VERIFICATION_TYPICAL):
        with pytest.raises(InvalidArgument, match="a rule of its own") as refused:
            check(changed(speculation(drafter=drafter, allow_approximate=True, verification=mode)), OFFER)
        assert refused.value.field == "speculation.verification"
    allowed = check(changed(speculation(drafter=drafter, allow_approximate=True)), OFFER)
    assert allowed.speculation.approximation == drafter


def test_what_is_approximate_is_named() -> None:
    assert SpeculationParams(drafter="ngram", allow_approximate=True).approximation == ""
    assert SpeculationParams(drafter="ngram", verification="typical").approximation == "typical"
    assert SpeculationParams(drafter="cascade").approximation == "cascade"
