"""transformers in bf16, as a peer: `python peer_transformers.py MODEL_DIRECTORY [lookup]`. See peer_protocol.py."""

import sys

import torch
from peer_protocol import Batch, answer_lines
from transformers import AutoModelForCausalLM

LOOKUP_TOKENS = 5


def main(directory: str, lookup: bool) -> None:
    """Loads the model and answers."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}

    def generate(prompts: Batch, max_tokens: int) -> Batch:
        longest = max(len(prompt) for prompt in prompts)
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                **extra,
            )
        return [row[longest:].tolist() for row in out]

    answer_lines("transformers", generate)


if __name__ == "__main__":
    main(sys.argv[1], "lookup" in sys.argv[2:])
