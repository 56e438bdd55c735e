"""Text to token ids and back, for a model directory with a tokenizer.json. Thread-safe.

Third party: the `tokenizers` library, used here only.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer as FastTokenizer

from core.chat_template import ChatTemplate, Message
from core.clock import Clock, SystemClock
from core.detokenizer import DecoderRecipe, byte_level_bytes
from core.errors import FailedPrecondition, InvalidArgument

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's vocabulary, chat template and end tokens."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Use `from_directory`."""
        tokenizer_file = directory / "tokenizer.json"
        description = _read_json(tokenizer_file)
        config = _read_json(directory / "tokenizer_config.json", optional=True)
        try:
            self._fast: FastTokenizer = FastTokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # boundary: the library raises bare Exception for a bad file
            raise FailedPrecondition("tokenizer", f"{tokenizer_file}: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._recipe = DecoderRecipe(description.get("decoder"))
        self.special_token_ids: frozenset[int] = frozenset(
            number for number, token in self._fast.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        special_tokens = _special_tokens(config)
        self.bos_token_id: int | None = self._id_of(special_tokens.get("bos_token"))
        self.eos_token_ids: tuple[int, ...] = self._find_eos(directory, special_tokens.get("eos_token"))
        source = _template_source(directory, config)
        self._template = ChatTemplate(source, special_tokens, clock) if source is not None else None

    @classmethod
    def from_directory(cls, directory: Path, clock: Clock | None = None) -> "Tokenizer":
        """Loads tokenizer.json and its neighbours. Raises FailedPrecondition naming what is wrong."""
        return cls(directory, clock if clock is not None else SystemClock())

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids. Special tokens spelt in `text` become themselves, as in the field.

        Raises InvalidArgument for lone surrogates. With `add_special`, what the model's post-processor adds.
        """
        check_text("text", text)
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of all ids at once; unknown ids are nothing."""
        decoder = IncrementalDetokenizer(self, skip_special)
        return decoder.push(ids) + decoder.flush()

    def token_text(self, token_id: int) -> str:
        """One token alone as text; bytes that are no whole character become U+FFFD; "" if unknown."""
        return self.decode([token_id], skip_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; b"" if unknown."""
        spelling = self.spelling(token_id)
        if spelling is None:
            return b""
        return byte_level_bytes(spelling) if self._recipe.byte_level else self.token_text(token_id).encode()

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None if there is none."""
        if not 0 <= token_id < 2**31:
            return None
        spelling: str | None = self._fast.id_to_token(token_id)
        return spelling

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text of a chat. Raises InvalidArgument where the template refuses it or is missing."""
        if self._template is None:
            raise InvalidArgument("chat", "this model has no chat template; send text or token ids")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json has it, without truncation and padding."""
        description: str = self._fast.to_str()
        return description

    def recipe(self) -> DecoderRecipe:
        """How this vocabulary decodes."""
        return self._recipe

    def _id_of(self, token: str | None) -> int | None:
        if token is None:
            return None
        number: int | None = self._fast.token_to_id(token)
        return number

    def _find_eos(self, directory: Path, named: str | None) -> tuple[int, ...]:
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _read_json(directory / name, optional=True).get("eos_token_id")
            found.extend(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
        by_name = self._id_of(named)
        if by_name is not None:
            found.append(by_name)
        return tuple(dict.fromkeys(found))


class IncrementalDetokenizer:
    """Text of a growing answer: all pushes and the flush, joined, equal `Tokenizer.decode` of all ids.

    Each token is looked at once. Text that a later token could still change is held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._spelling = tokenizer.spelling
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset[int]()
        self._decoder = tokenizer.recipe().make()

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain after these further ids."""
        pieces: list[str] = []
        for token_id in ids:
            spelling = None if token_id in self._skipped else self._spelling(token_id)
            if spelling is not None:
                pieces.append(self._decoder.push(spelling))
        return "".join(pieces)

    def flush(self) -> str:
        """What was held back, unfinished characters as U+FFFD. Call once, at the end."""
        return self._decoder.flush()

    def fork(self) -> Self:
        """A second one that stands where this one does."""
        copied = copy.copy(self)
        copied._decoder = self._decoder.fork()
        return copied


def check_text(field: str, text: str) -> None:
    """Raises InvalidArgument naming `field` where `text` cannot be encoded (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"holds a lone surrogate at character {error.start}") from error


def _read_json(path: Path, optional: bool = False) -> dict[str, object]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FailedPrecondition("model", f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise FailedPrecondition("model", f"{path} holds no JSON object")
    return value


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Names and texts of the special tokens, as templates call them."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(directory: Path, config: Mapping[str, object]) -> str | None:
    """chat_template.jinja, else the template (or the one named default) of tokenizer_config.json."""
    own_file = directory / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
