"""llama.cpp on the CPU, as a peer, run by the Python of its own environment. See peer_protocol.py.

python peer_llama_cpp.py GGUF

Its C interface by way of llama-cpp-python, with its own defaults: the wrapper's loop would cost it time at every token.
On a CPU with AMX gcc 12 miscompiles it (ggml_tile_config_init: the stores of the tile configuration are dropped, and
the first prompt ends in a segmentation fault); `asm volatile("" : "+m"(tc));` before `_tile_loadconfig(&tc);` mends it.
"""

import os
import sys
from collections.abc import Iterator

# Ours may be set to threads that sleep at once (docs/bench-log.md); the peer has its library's defaults.
os.environ.pop("OMP_WAIT_POLICY", None)
os.environ.pop("GOMP_SPINCOUNT", None)

import llama_cpp as llama
from peer_protocol import stream_lines

NUM_THREADS = 2
CONTEXT_TOKENS = 4096
BATCH_TOKENS = 512


class LlamaCpp:
    """One model with one context; lives as long as the process. Raises ValueError where the file is not readable."""

    def __init__(self, gguf: str) -> None:
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(gguf.encode(), llama.llama_model_default_params())
        if model is None:
            raise ValueError(f"{gguf} is not a model that llama.cpp loads")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch = CONTEXT_TOKENS, BATCH_TOKENS
        params.n_threads = params.n_threads_batch = NUM_THREADS
        self._context = llama.llama_init_from_model(model, params)
        self._sampler = llama.llama_sampler_init_greedy()

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[int]:
        """A greedy answer of exactly `max_tokens` tokens; nothing is kept of an earlier prompt."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
        for start in range(0, len(prompt), BATCH_TOKENS):
            self._decode(prompt[start : start + BATCH_TOKENS])
        for left in range(max_tokens, 0, -1):
            token_id = llama.llama_sampler_sample(self._sampler, self._context, -1)
            yield token_id
            if left > 1:
                self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> None:
        tokens = (llama.llama_token * len(token_ids))(*token_ids)
        code = llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, len(token_ids)))
        if code:
            raise RuntimeError(f"llama_decode returned {code}")


if __name__ == "__main__":
    stream_lines("llama.cpp", LlamaCpp(sys.argv[1]).stream)
