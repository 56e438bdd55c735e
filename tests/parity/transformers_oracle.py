"""Parity with transformers on the same weights, in one command.

    python -m tests.parity.transformers_oracle [--model NAME] [--prompts 50] [--tokens 64] [--output FILE]

float32: our greedy answers are fed to transformers in one forward each. Its argmax equals our token at
every position if and only if its own greedy text is ours; a difference is allowed only where its top-2
margin is under 2 × max |Δlogit|. bfloat16: both models read the float32 answers (teacher forcing) and
their top-1 tokens are compared. Exit code 0: all bounds hold; 1: one does not.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.bench.prompts import DEFAULT_MODEL, OWN_PROMPTS, model_directory, read_prompts

MAX_LOGIT_DIFFERENCE = 1e-3
MIN_BFLOAT16_AGREEMENT = 0.97
_BATCH = 8


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A position at which the two models' top-1 tokens differ; `margin` is transformers' own, between its two best."""

    prompt: int
    position: int
    our_token: int
    their_token: int
    margin: float


@dataclass(slots=True)
class Comparison:
    """What one dtype's run found."""

    dtype: str
    positions: int = 0
    max_logit_difference: float = 0.0
    disagreements: list[Disagreement] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """Share of positions with the same top-1 token."""
        return 1 - len(self.disagreements) / max(self.positions, 1)

    def failures(self) -> list[str]:
        """The bounds that do not hold."""
        if self.positions == 0:
            return [f"{self.dtype}: nothing was compared"]
        if self.dtype == "bfloat16":
            if self.agreement >= MIN_BFLOAT16_AGREEMENT:
                return []
            return [
                f"bfloat16: top-1 agrees at {self.agreement:.4f} of positions, not {MIN_BFLOAT16_AGREEMENT}"
            ]
        found = []
        if not self.max_logit_difference <= MAX_LOGIT_DIFFERENCE:
            found.append(f"float32: max |Δlogit| {self.max_logit_difference:.2e} > {MAX_LOGIT_DIFFERENCE}")
        wide = [each for each in self.disagreements if each.margin >= 2 * self.max_logit_difference]
        if wide:
            found.append(f"float32: {len(wide)} greedy tokens differ beyond 2 × max |Δlogit|")
        return found

    def add(self, prompt: int, first_position: int, ours: Tensor, theirs: Tensor) -> None:
        """Compare logits [positions, vocab] float32."""
        self.positions += ours.shape[0]
        self.max_logit_difference = max(self.max_logit_difference, float((ours - theirs).abs().max()))
        best = theirs.topk(2, dim=-1)
        our_tokens, their_tokens = ours.argmax(-1), theirs.argmax(-1)
        for row in (our_tokens != their_tokens).nonzero().flatten().tolist():
            margin = float(best.values[row, 0] - best.values[row, 1])
            self.disagreements.append(
                Disagreement(
                    prompt, first_position + row, int(our_tokens[row]), int(their_tokens[row]), margin
                )
            )


def load_theirs(model: Path, dtype: torch.dtype) -> Any:
    """transformers' model over the same files, its weights dense in `dtype`."""
    from transformers import AutoModelForCausalLM, GgufConfig

    name, options = _their_source(model)
    if options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options).eval()


def _their_source(model: Path) -> tuple[str, dict[str, Any]]:
    file = model if model.is_file() else next(iter(sorted(model.glob("*.gguf"))), None)
    if file is None:
        return str(model), {}
    return str(file.parent), {"gguf_file": file.name}


def tokenised_prompts(model: Path, count: int) -> list[list[int]]:
    """The project's own prompts as the router would tokenise them (`tokenizer_oracle` proves those ids)."""
    prompts = read_prompts(OWN_PROMPTS, Tokenizer.from_directory(model), count)
    return [list(prompt.token_ids) for prompt in prompts]


def our_greedy(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int
) -> list[tuple[list[int], Tensor]]:
    """Answers and their logits [num_tokens, vocab], `_BATCH` prompts at a time; an end token does not end it."""
    answers: list[tuple[list[int], Tensor]] = []
    for first in range(0, len(prompts), _BATCH):
        batch = prompts[first : first + _BATCH]
        tables = [engine.kv.open() for _ in batch]
        pending = [list(prompt) for prompt in batch]
        logits: list[list[Tensor]] = [[] for _ in batch]
        for _ in range(num_tokens):
            steps = []
            for table, tokens in zip(tables, pending, strict=True):
                engine.kv.reserve(table, table.num_tokens + len(tokens))
                steps.append(SequenceStep(table, table.num_tokens, tokens, logit_rows="last"))
            result = engine.step(steps)
            for index, (table, step) in enumerate(zip(tables, steps, strict=True)):
                engine.kv.commit(table, step.start + len(step.token_ids))
                logits[index].append(result.logits[index].clone())
                pending[index] = [int(result.logits[index].argmax())]
        for table, rows in zip(tables, logits, strict=True):
            engine.kv.close(table)
            stacked = torch.stack(rows)
            answers.append((stacked.argmax(-1).tolist(), stacked))
    return answers


def our_teacher_forced(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Our logits at the answer's positions: [len(answer), vocab]."""
    tokens = [*prompt, *answer[:-1]]
    table = engine.kv.open()
    try:
        engine.kv.reserve(table, len(tokens))
        return engine.step([SequenceStep(table, 0, tokens)]).logits[len(prompt) - 1 :]
    finally:
        engine.kv.close(table)


def their_teacher_forced(theirs: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """transformers' logits at the same positions, float32."""
    tokens = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():
        logits: Tensor = theirs(tokens).logits[0, len(prompt) - 1 :].float()
    return logits


def compare(model: Path, num_prompts: int, num_tokens: int, threads: int) -> list[Comparison]:
    """Both runs."""
    prompts = tokenised_prompts(model, num_prompts)
    settings = EngineSettings(dtype="float32", num_threads=threads)
    engine = Engine.load(model, settings)
    answers = our_greedy(engine, prompts, num_tokens)
    engine.close()
    wide = Comparison("float32")
    theirs = load_theirs(model, torch.float32)
    for index, (prompt, (answer, logits)) in enumerate(zip(prompts, answers, strict=True)):
        wide.add(index, len(prompt), logits, their_teacher_forced(theirs, prompt, answer))
    engine = Engine.load(model, settings.model_copy(update={"dtype": "bfloat16"}))
    theirs = load_theirs(model, torch.bfloat16)
    narrow = Comparison("bfloat16")
    for index, (prompt, (answer, _)) in enumerate(zip(prompts, answers, strict=True)):
        ours = our_teacher_forced(engine, prompt, answer)
        narrow.add(index, len(prompt), ours, their_teacher_forced(theirs, prompt, answer))
    return [wide, narrow]


def main() -> int:
    """Compare, print, write; the exit code tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Alias, directory or .gguf file.")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    comparisons = compare(model_directory(options.model), options.prompts, options.tokens, options.threads)
    failures: list[str] = []
    for comparison in comparisons:
        print(
            f"{comparison.dtype}: {comparison.positions} positions, "
            f"max |Δlogit| {comparison.max_logit_difference:.2e}, same top-1 at {comparison.agreement:.4%}"
        )
        for each in comparison.disagreements:
            print(
                f"  prompt {each.prompt} position {each.position}: ours {each.our_token}, "
                f"theirs {each.their_token}, margin {each.margin:.6f}"
            )
        failures += comparison.failures()
    if options.output is not None:
        report = [{**asdict(comparison), "agreement": comparison.agreement} for comparison in comparisons]
        options.output.write_text(json.dumps({"runs": report, "failures": failures}, indent=1))
    print("parity holds" if not failures else "\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
