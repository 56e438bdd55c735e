"""What a grammar costs a step: eight draft nodes of one request with a JSON schema, against the same without.

    python -m tests.bench.grammar_cost --model DIR [--threads 2] [--rounds 3] [--json FILE]

A document that follows the schema is decoded step by step with drafts that are right for four tokens and wrong for
four, once with the schema and once without, in turn; the step is the target's forward, the draft's pruning and the
verification. The ratio is that of the medians. Masks are also timed by themselves, by matchers built for it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from core.clock import SystemClock
from core.grammar import CompiledGrammar, GrammarCompiler
from core.records import Grammar, SamplingParams
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.draft import Draft, VerifyItem
from decode.grammar_state import GrammarState
from decode.sampling.history import TokenHistory
from decode.sampling.masking import allowed_part
from decode.verification.verify import verify
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.bench.engine_bench import filled_table

LIMIT = 1.1
NUM_RIGHT, NUM_WRONG = 4, 4
CONTEXT = 256
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{1,20}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "vip", "blocked"]}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps({"type": "array", "items": PERSON}))
DOCUMENT = json.dumps(
    [
        {
            "name": f"{name} of the long road",
            "age": age,
            "email": f"{name.lower()}@example.org",
            "tags": ["new", "vip"],
        }
        for name, age in (
            ("Ann", 31),
            ("Boris", 7),
            ("Carla", 90),
            ("Dmitri", 44),
            ("Eve", 18),
            ("Frank", 66),
        )
    ]
)


def main() -> None:
    """Prints the figures; the exit status says whether the limit holds."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    tokenizer = Tokenizer.from_directory(given.model)
    engine = Engine.load(given.model, EngineSettings(num_threads=given.threads))
    started_s = time.perf_counter()
    compiler = GrammarCompiler(tokenizer)
    compiler.compile(Grammar("regex", "a"))
    table_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    compiled = compiler.compile(SCHEMA)
    compile_s = time.perf_counter() - started_s
    with_s, without_s = [], []
    for _ in range(given.rounds):
        without_s += steps(engine, tokenizer, None)
        with_s += steps(engine, tokenizer, compiled)
    figures = {
        "ratio": statistics.median(with_s) / statistics.median(without_s),
        "step_with_ms": 1e3 * statistics.median(with_s),
        "step_without_ms": 1e3 * statistics.median(without_s),
        "vocabulary_s": table_s,
        "compile_ms": 1e3 * compile_s,
        **mask_times(tokenizer, compiled),
    }
    for name, value in figures.items():
        print(f"{name:20} {value:10.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))
    raise SystemExit(figures["ratio"] > LIMIT)


def steps(engine: Engine, tokenizer: Tokenizer, compiled: CompiledGrammar | None) -> list[float]:
    """Seconds of each step over the document."""
    answer = tokenizer.encode(DOCUMENT)
    sampling = SamplingParams(eos_token_ids=tokenizer.eos_token_ids, min_tokens=0)
    history = TokenHistory([1, 2])
    if compiled is not None:
        history.grammar = GrammarState(compiled, history, sampling, engine.config.vocab_size, SystemClock())
    table = filled_table(engine, CONTEXT)
    engine.kv.reserve(table, CONTEXT + 1 + NUM_RIGHT + NUM_WRONG)
    seconds: list[float] = []
    try:
        while history.num_output + NUM_RIGHT + NUM_WRONG + 1 < len(answer):
            seconds.append(_step(engine, table, answer, history, sampling))
            history.extend(answer[history.num_output :][: NUM_RIGHT + 1])
    finally:
        engine.kv.close(table)
    return seconds


def _step(
    engine: Engine, table: BlockTable, answer: list[int], history: TokenHistory, sampling: SamplingParams
) -> float:
    """The context's K and V stay the same, so that every step costs the target as much; only its tokens change."""
    done = history.num_output
    nodes = (*answer[done : done + NUM_RIGHT], *answer[done + 1 : done + 1 + NUM_WRONG])
    parents = (*range(NUM_RIGHT), *range(NUM_WRONG))
    started_s = time.perf_counter()
    draft = Draft(nodes, parents)
    kept = draft if history.grammar is None else allowed_part(draft, history.grammar)
    if history.grammar is not None and len(kept.token_ids) < NUM_RIGHT:
        raise AssertionError("the document does not follow its schema")
    root = history.token_ids[-1]
    logits = engine.step([SequenceStep(table, CONTEXT, (root, *nodes), (0, *parents))]).logits
    item = VerifyItem(sampling, 1, 0, history, len(history.token_ids), 0, kept)
    (verdict,) = verify([item], logits[: 1 + len(kept.token_ids)])
    if verdict.error is not None:
        raise AssertionError(verdict.error)
    return time.perf_counter() - started_s


def mask_times(tokenizer: Tokenizer, compiled: CompiledGrammar) -> dict[str, float]:
    """Of masks, moves and copies, over the document, in microseconds."""
    matcher = compiled.matcher()
    masks: list[float] = []
    moves: list[float] = []
    for token_id in tokenizer.encode(DOCUMENT):
        started_s = time.perf_counter()
        matcher.bitmask()
        masked_s = time.perf_counter()
        if matcher.consume([token_id]) != 1:
            raise AssertionError("the document does not follow its schema")
        masks.append(masked_s - started_s)
        moves.append(time.perf_counter() - masked_s)
    started_s = time.perf_counter()
    matcher.rollback(8)
    rollback_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    compiled.matcher()
    copy_s = time.perf_counter() - started_s
    return {
        "mask_median_us": 1e6 * statistics.median(masks),
        "mask_p95_us": 1e6 * sorted(masks)[int(0.95 * len(masks))],
        "mask_max_us": 1e6 * max(masks),
        "consume_median_us": 1e6 * statistics.median(moves),
        "rollback_of_8_us": 1e6 * rollback_s,
        "copy_us": 1e6 * copy_s,
    }


if __name__ == "__main__":
    main()
