"""How far a head is from its target, and what both verification modes make of it: sampled, with chains.

    python -m tests.bench.draft_distance --drafter eagle3 [--prompts FILE] [--temperature 0.7] [--json FILE]

(1) In this process: total variation TV of target and draft after the request's pipeline, mean over the positions of
plain answers (all but the first token); 1 - TV, which is rejection's acceptance there; how often the shared noise of
invariant mode agrees there; its bound (1 - TV) / (1 + TV). (2) Served: acceptance at position 1. Steps begin behind
rejected drafts, at harder places than the mean, and rejection offers nothing where the head is too unsure
(`min_probability`), so that (2) need not be the mean of (1). (3) Served: tokens a second after the first ones, as
median over prompts of the ratio, with its lower 95 % bound; arms interleaved prompt by prompt, in another order and
with another seed every round. Every answer of invariant mode must be plain decoding's, and so must those of (1), or
the exit code is 1.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

from cluster.local import LocalCluster
from core.records import GREEDY_TEMPERATURE, SamplingParams
from core.tokenizer import Tokenizer
from outrider import Client, GenerateOptions
from tests.bench.coupling import Coupling, mean_coupling
from tests.bench.head_alone import HeadAlone
from tests.bench.prompts import DEFAULT_MODEL, OWN_PROMPTS, Prompt, model_directory, read_prompts
from tests.bench.ratios import median_ratio, ratios_by_prompt, rotated
from tests.bench.timed import SHORTEST_ANSWER, Timed, timed

PLAIN, INVARIANT, REJECTION = "none", "invariant", "rejection"
ARMS = (PLAIN, INVARIANT, REJECTION)
PAIRS = ((INVARIANT, PLAIN), (REJECTION, PLAIN), (INVARIANT, REJECTION))
WISHED = 0.85
"""Of rejection's speed, which invariant mode should keep."""
console = Console(highlight=False, width=120)

Answers = dict[tuple[str, int], tuple[int, ...]]


@dataclass(slots=True)
class Arm:
    """What one way of decoding did. By (prompt, round): `rates`, tokens a second of answers long enough to be timed."""

    steps: int = 0
    offered: int = 0
    accepted: int = 0
    step_tokens: float = 0.0
    rates: dict[tuple[str, int], float] = field(default_factory=dict)
    token_ids: Answers = field(default_factory=dict)

    def take(self, key: tuple[str, int], answer: Timed) -> None:
        """One answer; offered and accepted are those at position 1."""
        report = answer.speculation
        self.steps += report.steps
        self.offered += sum(report.position_offered[:1])
        self.accepted += sum(report.position_accepted[:1])
        self.step_tokens += (report.acceptance_length or 0.0) * report.steps
        self.token_ids[key] = answer.token_ids
        if answer.tokens >= SHORTEST_ANSWER:
            self.rates[key] = answer.rate

    def row(self) -> dict[str, object]:
        """What is printed and reported."""
        return {
            "position_1": round(self.accepted / self.offered, 4) if self.offered else None,
            "offered": self.offered,
            "steps": self.steps,
            "acceptance_length": round(self.step_tokens / self.steps, 3) if self.steps else None,
            "tokens_a_second": round(median(self.rates.values()), 1) if self.rates else None,
        }


def seed_of(prompt: Prompt, number: int) -> int:
    """The seed of a prompt's answers in a round, for all arms."""
    return prompt.seed + number


def measure_distance(
    options: argparse.Namespace, prompts: Sequence[Prompt]
) -> tuple[list[Coupling], Answers]:
    """A coupling for each drafted position of the first round's plain answers, and these answers."""
    alone = HeadAlone.load(model_directory(options.model), options.drafter, options.config)
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    couplings: list[Coupling] = []
    answers: Answers = {}
    for prompt in track(prompts, "distance", console=console, transient=True):
        token_ids, found = alone.answer(prompt, sampling, seed_of(prompt, 0))
        answers[prompt.prompt_id, 0] = tuple(token_ids)
        couplings += found
    return couplings, answers


def measure_served(client: Client, prompts: Sequence[Prompt], options: argparse.Namespace) -> dict[str, Arm]:
    """All arms over all prompts, behind one answer each that does not count."""
    arms = {name: Arm() for name in ARMS}
    for name in ARMS:
        _ask(client, prompts[0], name, 0, options)
    for number in range(options.rounds):
        for place, prompt in enumerate(
            track(prompts, f"round {number + 1}", console=console, transient=True)
        ):
            for name in rotated(ARMS, number + place):
                answer = _ask(client, prompt, name, number, options)
                arms[name].take((prompt.prompt_id, number), answer)
    return arms


def _ask(client: Client, prompt: Prompt, arm: str, number: int, options: argparse.Namespace) -> Timed:
    asked: GenerateOptions = {"temperature": options.temperature, "seed": seed_of(prompt, number)}
    if arm == PLAIN:
        return timed(client, prompt, PLAIN, options.max_tokens, "distance", asked)
    asked |= {"draft_length": options.draft_length, "draft_width": 1}
    asked["verification"] = "invariant" if arm == INVARIANT else "rejection"
    return timed(client, prompt, options.drafter, options.max_tokens, "distance", asked)


def wrong_answers(answers: Answers, arms: Mapping[str, Arm]) -> dict[str, int]:
    """Answers that should be plain decoding's to the same prompt and seed, and are not; `answers`: of this process."""
    plain = arms[PLAIN].token_ids
    found = {INVARIANT: arms[INVARIANT].token_ids, "in_process": answers}
    return {name: sum(ids != plain[key] for key, ids in these.items()) for name, these in found.items()}


def report_of(couplings: Sequence[Coupling], answers: Answers, arms: Mapping[str, Arm]) -> dict[str, object]:
    """What is printed and kept."""
    distance = {name: round(value, 4) for name, value in asdict(mean_coupling(couplings)).items()}
    speed: dict[str, object] = {}
    for name, base in PAIRS:
        ratios = ratios_by_prompt(arms[name].rates, arms[base].rates)
        found = median_ratio(ratios) if ratios else None
        bound = found.lower_bound if found else None
        speed[f"{name} / {base}"] = {
            "median": round(found.median, 3) if found else None,
            "lower_bound": None if bound is None else round(bound, 3),
            "prompts": len(ratios),
        }
    return {
        "distance": {"positions": len(couplings), **distance},
        "served": {name: arm.row() for name, arm in arms.items()},
        "speed": speed,
        "wished": {f"{INVARIANT} / {REJECTION}": WISHED},
        "differing_answers": wrong_answers(answers, arms),
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.draft_distance", description=__doc__)
    parser.add_argument(
        "--drafter", default="eagle3", help="a head: eagle, eagle2, eagle3, mtp or NAME@VERSION"
    )
    parser.add_argument("--draft-length", type=int, default=4, help="K of the served chains")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--limit", type=int, default=None, help="prompts, spread over the file; default: all")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--config", type=Path, default=None, help="TOML of the server")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, default=None, help="where a JSON report goes")
    options = parser.parse_args(arguments)
    if options.temperature < GREEDY_TEMPERATURE:
        parser.error(f"--temperature: below {GREEDY_TEMPERATURE} nothing is drawn")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0 where every answer that has to be plain decoding's is."""
    options = parse(arguments)
    tokenizer = Tokenizer.from_directory(model_directory(options.model))
    prompts = read_prompts(options.prompts, tokenizer, options.limit)
    couplings, answers = measure_distance(options, prompts)
    extra = () if options.config is None else ("--config", str(options.config))
    with (
        tempfile.TemporaryDirectory(prefix="outrider-bench-") as work,
        LocalCluster(
            model=options.model, prefill=0, arguments=extra, log_path=Path(work) / "serve.log"
        ) as cluster,
        Client(cluster.address, timeout_s=300.0) as client,
    ):
        arms = measure_served(client, prompts, options)
    report = report_of(couplings, answers, arms)
    console.print_json(json.dumps(report))
    if options.json is not None:
        plan = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"plan": plan, **report}, indent=1))
    return 1 if any(wrong_answers(answers, arms).values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
