"""Classification by rules and what `auto` makes of it."""

from dataclasses import replace

import pytest

from core.clock import SystemClock
from core.errors import InvalidArgument
from core.records import REQUEST_CLASSES, SpeculationParams
from core.settings import ClassPolicy
from router.classify import classify
from router.policy import DEFAULT_POLICIES, choose_drafting, load_policies, parse_policies

HOSTED = frozenset({"none", "ngram"})
PASSAGE = "The lighthouse stood at the end of the pier and was painted every second spring. " * 15

PROMPTS = [
    (
        "structured",
        "Extract the names and ages below. Return the result as a JSON object.\nAnna is 31, Ben is 12.",
    ),
    ("structured", 'You may use tools. {"name": "weather", "parameters": {"city": "string"}}'),
    ("structured", "List three rivers as a markdown table with columns name and length."),
    ("code", "Write a Python function that reverses a linked list."),
    ("code", "def area(radius):\n    return 3 * radius\n\nFix the bug."),
    ("code", "What does this do?\n```python\nprint(sum(x))\n```"),
    ("chat", "Hi, how are you today?"),
    ("chat", "Who painted the Mona Lisa?"),
    (
        "reasoning",
        "A train leaves at 9 and goes 60 km an hour. How far has it come at 11? Think step by step.",
    ),
    ("reasoning", "Prove that the sum of two odd numbers is even."),
    ("creative", "Write a short story about a lighthouse keeper and a gull."),
    ("creative", "Compose a haiku for a rainy Monday."),
    ("translation", "Translate to French: The harbour is closed."),
    ("translation", "Please translate the following sentence into German.\nThe harbour is closed."),
    ("summarisation", "Summarize: " + PASSAGE),
    ("summarisation", PASSAGE + "\nGive a summary of the text above."),
    ("summarisation", PASSAGE + "\nWhen was the lighthouse painted?"),
    (
        "batch",
        "Classify the following reviews as good or bad.\n"
        + "\n".join(f"{i}. It was fine." for i in range(9)),
    ),
]


@pytest.mark.parametrize(("expected", "prompt"), PROMPTS)
def test_a_prompt_of_each_kind_finds_its_class(expected: str, prompt: str) -> None:
    assert classify(prompt).request_class == expected


ODD_UNITS = ("?", "(", "\n", "\n ", "1. x\n", "a json_", "how much ", "as a ", "`")
ODD_TEXTS = ["", "\0", *(unit * 9_000 for unit in ODD_UNITS)]


@pytest.mark.parametrize("prompt", ODD_TEXTS, ids=range(len(ODD_TEXTS)))
def test_any_text_has_a_class_and_none_takes_time_beyond_its_length(prompt: str) -> None:
    clock = SystemClock()
    started_s = clock.now_s()
    assert all(classify(prompt).request_class in REQUEST_CLASSES for _ in range(5))
    assert clock.now_s() - started_s < 1.0


def test_each_class_has_a_policy_that_any_worker_can_follow() -> None:
    assert set(DEFAULT_POLICIES) == set(REQUEST_CLASSES)
    for policy in DEFAULT_POLICIES.values():
        assert "ngram" in policy.preference
        plan = choose_drafting(SpeculationParams(), policy, HOSTED, 16)
        assert (plan.speculation.drafter, plan.candidates) == ("ngram", ())


def test_a_policy_file_changes_what_it_names_and_nothing_else() -> None:
    table = parse_policies(
        '[class.code]\ndrafter = "draft_model"\ndraft_length = 2\n[class.summarization]\ndrafter="none"\n'
    )
    assert table["code"] == ClassPolicy(drafter="draft_model", draft_length=2)
    assert table["summarisation"].drafter == "none"
    assert table["chat"] == DEFAULT_POLICIES["chat"]


def test_a_key_that_a_section_leaves_out_keeps_the_default_of_its_class() -> None:
    table = parse_policies("[class.chat]\ndraft_length = 6\n[class.code]\ndrafter = 'ngram'\n")
    assert table["chat"] == DEFAULT_POLICIES["chat"].model_copy(update={"draft_length": 6})
    assert table["code"] == DEFAULT_POLICIES["code"].model_copy(update={"drafter": "ngram"})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[class.code", "not TOML"),
        ('[class.poetry]\ndrafter = "none"', "class.poetry"),
        ("[class.code]\ndraft_lenght = 2", "class.code.draft_lenght"),
        ('[class.code]\ndraft_length = "two"', "class.code.draft_length"),
        ("[class.code]\ndraft_length = -1", "class.code.draft_length"),
        ("[class.code]\ndraft_length = 1000000", "class.code.draft_length"),
        ('[class.code]\ndrafter = "auto"', "class.code.drafter"),
        ("[class.code]\ndrafter = []", "class.code.drafter"),
        ('[class.code]\ndrafter = ["ngram", "auto"]', "class.code.drafter"),
        ("[classes.code]\ndraft_length = 2", "classes"),
        ("class = 3", "class"),
    ],
)
def test_a_bad_policy_file_is_refused_naming_the_key(text: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        parse_policies(text)


def test_a_policy_file_that_is_missing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="policy_file"):
        load_policies("/nonexistent/policies.toml")


POLICY = ClassPolicy(drafter="ngram", draft_length=5)


@pytest.mark.parametrize(
    ("requested", "policy", "drafter", "length", "fixed"),
    [
        (SpeculationParams(), POLICY, "ngram", 5, False),
        (SpeculationParams(draft_length=2), POLICY, "ngram", 2, True),
        (SpeculationParams(drafter="ngram"), POLICY, "ngram", None, False),
        (SpeculationParams(drafter="ngram", draft_length=9), POLICY, "ngram", 9, True),
        (SpeculationParams(drafter="none"), POLICY, "none", None, False),
        (SpeculationParams(drafter="none", draft_length=0), POLICY, "none", 0, True),
        (SpeculationParams(), ClassPolicy(drafter="ngram", draft_length=64), "ngram", 16, False),
        (SpeculationParams(), ClassPolicy(drafter="eagle", draft_length=4), "none", None, False),
        (SpeculationParams(), ClassPolicy(drafter=("eagle", "ngram"), draft_length=4), "ngram", 4, False),
        (SpeculationParams(), ClassPolicy(drafter=("eagle", "mtp")), "none", None, False),
        (SpeculationParams(), ClassPolicy(drafter=("none", "ngram")), "none", None, False),
        (SpeculationParams(drafter="eagle", draft_length=4), POLICY, "none", 0, True),
    ],
)
def test_auto_becomes_one_drafter_and_what_is_given_stays(
    requested: SpeculationParams, policy: ClassPolicy, drafter: str, length: int | None, fixed: bool
) -> None:
    plan = choose_drafting(requested, policy, HOSTED, 16)
    assert (plan.speculation.drafter, plan.speculation.draft_length, plan.fixed) == (drafter, length, fixed)
    assert bool(plan.fallback) == ("not hosted" in plan.reason)


@pytest.mark.parametrize(
    ("drafters", "candidates"),
    [
        (("eagle3", "ngram"), ("eagle3", "ngram")),
        (("ngram", "medusa", "eagle3"), ("ngram", "eagle3")),
        (("eagle3", "ngram", "eagle3"), ("eagle3", "ngram")),
        (("eagle3", "ngram", "none", "cache"), ("eagle3", "ngram")),
        (("eagle3", "bild", "ngram"), ("eagle3", "ngram")),
        (("eagle3", "none", "ngram"), ()),
        (("bild", "ngram"), ()),
        (("medusa", "mtp"), ()),
        ("ngram", ()),
    ],
)
def test_of_several_hosted_drafters_the_worker_chooses_and_a_single_one_is_fixed(
    drafters: str | tuple[str, ...], candidates: tuple[str, ...]
) -> None:
    hosted = frozenset({"none", "ngram", "eagle3", "cache", "bild"})
    plan = choose_drafting(SpeculationParams(), ClassPolicy(drafter=drafters, draft_length=5), hosted, 16)
    assert plan.candidates == candidates
    assert (plan.speculation.drafter == "auto") == bool(candidates)
    if candidates:
        assert (plan.speculation.draft_length, plan.fixed, plan.fallback) == (5, False, "")
        assert all(name in plan.reason for name in candidates)


@pytest.mark.parametrize("drafters", ["bild", ("bild",), ("bild", "cascade"), ("bild", "mtp")])
def test_no_policy_makes_auto_what_the_request_does_not_allow(drafters: str | tuple[str, ...]) -> None:
    policy, hosted = ClassPolicy(drafter=drafters), HOSTED | {"bild"}
    assert choose_drafting(SpeculationParams(), policy, hosted, 16).speculation.drafter == "none"
    allowing = SpeculationParams(allow_approximate=True)
    wanted = "bild" if policy.preference == ("bild",) else "none"
    assert choose_drafting(allowing, policy, hosted, 16).speculation.drafter == wanted
    typical = replace(allowing, verification="typical")
    assert choose_drafting(typical, policy, hosted, 16).speculation.drafter == "none"


def test_what_the_client_names_is_no_question_to_the_worker() -> None:
    policy = ClassPolicy(drafter=("eagle3", "ngram"))
    plan = choose_drafting(SpeculationParams(drafter="ngram"), policy, HOSTED | {"eagle3"}, 16)
    assert (plan.speculation.drafter, plan.candidates) == ("ngram", ())
