"""Our engine alone, without any serving around it, as a peer: `python -m tests.bench.peer_engine MODEL_DIRECTORY`."""

import sys
from pathlib import Path

from core.settings import EngineSettings
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.bench.peer_protocol import Batch, answer_lines

CHUNK_TOKENS = 256


def generate(engine: Engine, prompts: Batch, max_tokens: int) -> Batch:
    """Greedy answers of a batch: prompts one after the other in chunks, then all together step by step."""
    tables = [engine.kv.open() for _ in prompts]
    try:
        answers = [[_prefill(engine, table, prompt)] for table, prompt in zip(tables, prompts, strict=True)]
        lengths = [len(prompt) for prompt in prompts]
        for _ in range(max_tokens - 1):
            steps = []
            for table, length, answer in zip(tables, lengths, answers, strict=True):
                start = length + len(answer) - 1
                engine.kv.reserve(table, start + 1)
                steps.append(SequenceStep(table, start, (answer[-1],)))
            chosen = engine.step(steps).logits.argmax(dim=-1).tolist()
            for table, length, answer, token_id in zip(tables, lengths, answers, chosen, strict=True):
                engine.kv.commit(table, length + len(answer))
                answer.append(token_id)
        return answers
    finally:
        for table in tables:
            engine.kv.close(table)


def _prefill(engine: Engine, table: BlockTable, prompt: list[int]) -> int:
    token_id = 0
    for start in range(0, len(prompt), CHUNK_TOKENS):
        chunk = prompt[start : start + CHUNK_TOKENS]
        engine.kv.reserve(table, start + len(chunk))
        logits = engine.step([SequenceStep(table, start, chunk, logit_rows="last")]).logits
        engine.kv.commit(table, start + len(chunk))
        token_id = int(logits[0].argmax())
    return token_id


def main(directory: str) -> None:
    """Loads the engine and answers."""
    engine = Engine.load(Path(directory), EngineSettings())
    engine.warm_up()
    answer_lines("engine", lambda prompts, max_tokens: generate(engine, prompts, max_tokens))


if __name__ == "__main__":
    main(sys.argv[1])
