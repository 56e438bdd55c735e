"""A pipelined target is refused, with the mend, where something asked for cannot go with it."""

import pytest

from core.errors import InvalidArgument
from core.settings import load_settings

TWO_STAGES = {"engine.pipeline_stages": 2, "prefill": 0}


@pytest.mark.parametrize(
    ("changes", "field", "mend"),
    [
        ({"prefill": 1}, "prefill", "take --prefill 0"),
        ({"engine.core_turns": "/run/turns"}, "engine.core_turns", "leave it out"),
        ({"decode_worker.drafters.layerskip": {}}, "decode_worker.drafters.layerskip", "no exits"),
        (
            {"decode_worker.drafters.ngram": None},
            "decode_worker.drafters.pass_drafter",
            r"set decode_worker\.drafters\.ngram, or name one that is",
        ),
        (
            {"decode_worker.drafters.pass_drafter": "draft_model"},
            "decode_worker.drafters.pass_drafter",
            r"draft_model is not configured; set decode_worker\.drafters\.draft_model",
        ),
        (
            {
                "decode_worker.drafters.pass_drafter": "eagle3",
                "decode_worker.drafters.shipped": False,
            },
            "decode_worker.drafters.pass_drafter",
            "eagle3 is not configured",
        ),
        ({"decode_worker.drafters.pass_drafter": "medusa"}, "decode_worker.drafters.pass_drafter", "ngram"),
        ({"engine.pipeline_stages": 3}, "engine.pipeline_stages", "2"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_its_name(
    changes: dict[str, object], field: str, mend: str
) -> None:
    with pytest.raises(InvalidArgument, match=mend) as refused:
        load_settings(None, {**TWO_STAGES, **changes})
    assert refused.value.field == field


def test_what_it_can_do_is_taken_and_a_whole_target_asks_for_nothing() -> None:
    assert load_settings(None, TWO_STAGES).decode_worker.drafters.pass_drafter == "ngram"
    shipped = {**TWO_STAGES, "decode_worker.drafters.pass_drafter": "eagle3"}
    assert load_settings(None, shipped).decode_worker.drafters.without_pass_drafter == ""
    whole = load_settings(None, {"decode_worker.drafters.ngram": None})
    assert (whole.engine.pipeline_stages, whole.prefill) == (1, 1)
