"""Whether a draft model speaks the target's token ids."""

import hashlib

from core.errors import FailedPrecondition
from core.tokenizer import Tokenizer


def require_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> int:
    """How many leading ids mean the same token in both: the ids that may be drafted.

    Padding differences are fine, and so are further tokens at the end of the draft's vocabulary. Raises
    FailedPrecondition naming the first id that means different tokens.
    """
    shared = min(target.vocab_size, draft.vocab_size)
    for token_id in range(shared):
        ours, theirs = target.spelling(token_id), draft.spelling(token_id)
        if ours != theirs:
            raise FailedPrecondition(
                "decode_worker.drafters.draft_model.model",
                f"token {token_id} is {ours!r} for the target and {theirs!r} for the draft model",
            )
    return shared


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Over the spelling of every id: equal where token ids mean the same."""
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocab_size):
        digest.update(repr(tokenizer.spelling(token_id)).encode() + b"\0")
    return digest.hexdigest()
