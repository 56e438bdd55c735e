"""vLLM on the CPU, as a peer, run by the Python of its own environment. See peer_protocol.py.

python peer_vllm.py MODEL_DIRECTORY [ngram]
"""

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from peer_protocol import Batch, answer_lines

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 8, "prompt_lookup_min": 2}


def main(directory: str, ngram: bool) -> None:
    """Loads the model and answers."""
    from vllm import LLM, SamplingParams, TokensPrompt

    extra = {"speculative_config": NGRAM} if ngram else {}
    llm = LLM(directory, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False, **extra)

    def generate(prompts: Batch, max_tokens: int) -> Batch:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in llm.generate(inputs, params, use_tqdm=False)]

    answer_lines("vllm", generate)


if __name__ == "__main__":
    main(sys.argv[1], "ngram" in sys.argv[2:])
