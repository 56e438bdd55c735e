"""Drafting ahead of a target in two stages: `python -m tests.bench.pass_bench --out FOLDER [--drafter ngram]`.

One served worker with `engine.pipeline_stages` 2 and one compute thread a stage. Three arms, interleaved prompt by
prompt in another order every round: `none`, the drafter by its own name in chains (drafts, then waits for both stages),
and `pass` (the same chains, drafted ahead). Prints tokens a second as ratios of pairs, the share of an answer's time in
which both stages compute, the steps given up as void, and tokens that differ from `none`'s, of which any makes
the exit code 1. FOLDER gets `pass.json` and, with matplotlib (the extra `plots`), `pass.png`: a stretch of steps.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from cluster.local import LocalCluster
from core.clock import SystemClock
from core.grpc_admin import AdminClient
from core.tokenizer import Tokenizer
from outrider import Client
from tests.bench.prompts import DEFAULT_MODEL, OWN_PROMPTS, Prompt, model_directory, read_prompts
from tests.bench.ratios import median_ratio, rotated

PLAIN, AHEAD = "none", "pass"
DRAWN_S = 0.6
console = Console(highlight=False, width=160)

Step = dict[str, float]


@dataclass(slots=True)
class Arm:
    """What one drafter did. `rates`: tokens a second by (prompt, round). `drawn`: the steps of one answer."""

    rates: dict[tuple[str, int], float] = field(default_factory=dict)
    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    both_s: float = 0.0
    wall_s: float = 0.0
    steps: int = 0
    void: int = 0
    accepted: int = 0
    offered: int = 0
    drawn: list[Step] = field(default_factory=list)

    def take(self, steps: Sequence[Step], wall_s: float) -> None:
        """The steps of one answer."""
        self.both_s += both_computing_s(steps)
        self.wall_s += wall_s
        self.steps += len(steps)
        self.void += sum(bool(step["void"]) for step in steps)
        self.drawn = list(steps)


def both_computing_s(steps: Sequence[Step]) -> float:
    """Seconds in which both stages compute. Spans of one stage do not overlap, and come in order."""
    total, first_steps = 0.0, list(steps)
    begin = 0
    for last in steps:
        for first in first_steps[begin:]:
            if first["first_began_s"] >= last["last_ended_s"]:
                break
            end = min(first["first_ended_s"], last["last_ended_s"])
            total += max(0.0, end - max(first["first_began_s"], last["last_began_s"]))
        while begin < len(first_steps) and first_steps[begin]["first_ended_s"] <= last["last_began_s"]:
            begin += 1
    return total


def measure(
    cluster: LocalCluster, prompts: Sequence[Prompt], names: Sequence[str], options: argparse.Namespace
) -> dict[str, Arm]:
    """All arms over all prompts."""
    arms = {name: Arm() for name in names}
    admin = AdminClient(cluster.worker("decode", 0).address)
    clock = SystemClock()
    with Client(cluster.address, timeout_s=300.0) as client:
        for place, prompt in enumerate(prompts):
            for number in range(options.rounds):
                for name in rotated(names, place + number):
                    arm = arms[name]
                    length = None if name == PLAIN else options.draft_length
                    started_s = clock.now_s()
                    answer = client.generate(
                        list(prompt.token_ids),
                        max_tokens=options.max_tokens,
                        temperature=0.0,
                        ignore_eos=True,
                        drafter=name,
                        draft_length=length,
                        draft_width=None if name == PLAIN else 1,
                        cache_salt="pass-bench",
                    )
                    ended_s = clock.now_s()
                    decoding_s = answer.timing.total_s - answer.timing.time_to_first_token_s
                    arm.rates[prompt.prompt_id, number] = len(answer.token_ids) / decoding_s
                    arm.token_ids[prompt.prompt_id] = tuple(answer.token_ids)
                    arm.accepted += answer.speculation.accepted_tokens
                    arm.offered += sum(answer.speculation.position_offered)
                    told: list[Step] = json.loads(admin.status(timeline=True).pipeline_timeline)
                    mine = [step for step in told if started_s <= step["first_began_s"] <= ended_s]
                    arm.take(mine, ended_s - started_s)
    return arms


def report_of(arms: Mapping[str, Arm], drafter: str) -> dict[str, object]:
    """What is printed and kept."""
    report: dict[str, object] = {}
    for name, base in ((drafter, PLAIN), (AHEAD, PLAIN), (AHEAD, drafter)):
        ratios = [rate / arms[base].rates[key] for key, rate in arms[name].rates.items()]
        found = median_ratio(ratios)
        report[f"{name} / {base}"] = {
            "median": round(found.median, 3),
            "lower_bound": None if found.lower_bound is None else round(found.lower_bound, 3),
            "pairs": found.count,
        }
    for name, arm in arms.items():
        report[name] = {
            "both_stages_share": round(arm.both_s / arm.wall_s, 3),
            "steps": arm.steps,
            "void_steps": arm.void,
            "acceptance_rate": round(arm.accepted / arm.offered, 3) if arm.offered else None,
        }
    report["differing_tokens"] = sum(
        sum(a != b for a, b in zip(ids, arms[PLAIN].token_ids[key], strict=False))
        + abs(len(ids) - len(arms[PLAIN].token_ids[key]))
        for arm in arms.values()
        for key, ids in arm.token_ids.items()
    )
    return report


def draw(arms: Mapping[str, Arm], path: Path) -> None:
    """One row for each arm and stage: when it computed, in the middle of its last answer."""
    try:
        import matplotlib
    except ImportError:
        console.print("no timeline is drawn: pip install 'outrider[plots]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(arms), 1, figsize=(12, 1.6 * len(arms)), sharex=True)
    for panel, (name, arm) in zip(panels, arms.items(), strict=True):
        steps = arm.drawn[len(arm.drawn) // 3 :]
        origin_s = steps[0]["first_began_s"] if steps else 0.0
        steps = [step for step in steps if step["first_began_s"] - origin_s < DRAWN_S]
        for row, stage in enumerate(("last", "first")):
            spans = [
                (
                    1e3 * (step[f"{stage}_began_s"] - origin_s),
                    1e3 * (step[f"{stage}_ended_s"] - step[f"{stage}_began_s"]),
                )
                for step in steps
            ]
            colors = ["tab:blue" if place % 2 else "tab:orange" for place in range(len(spans))]
            panel.broken_barh(spans, (row - 0.4, 0.8), facecolors=colors)
        panel.set_yticks([0, 1], ["last stage", "first stage"])
        panel.set_title(name, loc="left", fontsize=9)
    panels[-1].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pass_bench", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafter", default="ngram", choices=("ngram", "draft_model", "eagle", "eagle3"))
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--limit", type=int, default=8, help="prompts, spread over the file")
    parser.add_argument("--config", type=Path, default=None, help="TOML of the server")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, writes; 0 where every answer was plain decoding's."""
    options = parse(arguments)
    tokenizer = Tokenizer.from_directory(model_directory(options.model))
    prompts = read_prompts(options.prompts, tokenizer, options.limit)
    settings = {
        "engine.pipeline_stages": 2,
        "engine.num_threads": 1,
        "telemetry.pipeline_timeline": "true",
        "decode_worker.drafters.pass_drafter": options.drafter,
    }
    extra = () if options.config is None else ("--config", str(options.config))
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="outrider-bench-") as work,
        LocalCluster(
            model=options.model,
            prefill=0,
            settings=settings,
            arguments=extra,
            log_path=Path(work) / "serve.log",
        ) as cluster,
    ):
        arms = measure(cluster, prompts, (PLAIN, options.drafter, AHEAD), options)
    report = report_of(arms, options.drafter)
    console.print_json(json.dumps(report))
    plan = {key: str(value) for key, value in vars(options).items()}
    (options.out / "pass.json").write_text(json.dumps({"plan": plan, **report}, indent=1))
    draw(arms, options.out / "pass.png")
    return 0 if report["differing_tokens"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
