"""From token ids to text, token by token, equal to decoding all of them at once.

Two families of tokenizers are known: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with
byte fallback (Llama 2, Mistral, Gemma). Any other decoder is refused rather than guessed.
"""

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from core.errors import FailedPrecondition

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """Turns the vocabulary's spelling of tokens into text. One object serves one answer."""

    def push(self, token: str) -> str:
        """The text that is certain once `token` (as the vocabulary spells it) has come."""
        ...

    def flush(self) -> str:
        """What was held back. Nothing may be pushed afterwards."""
        ...

    def fork(self) -> "TokenDecoder":
        """A second one that stands where this one does."""
        ...


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE spells the 256 bytes with (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = byte_alphabet()


class ByteLevelDecoder:
    """Bytes are collected; what is no UTF-8 becomes U+FFFD, one for each maximal wrong part."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        """See `TokenDecoder.push`; holds at most three bytes of an unfinished character."""
        return self._utf8.decode(byte_level_bytes(token))

    def flush(self) -> str:
        """See `TokenDecoder.flush`."""
        return self._utf8.decode(b"", final=True)

    def fork(self) -> TokenDecoder:
        """See `TokenDecoder.fork`."""
        copied = ByteLevelDecoder()
        copied._utf8.setstate(self._utf8.getstate())
        return copied


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; a token outside the alphabet is taken literally."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


class SentencePieceDecoder:
    """Marks become spaces; a run of byte tokens is one character string or as many U+FFFD as bytes."""

    def __init__(self, mark: str, strip_leading_space: bool) -> None:
        self._mark = mark
        self._strip = strip_leading_space
        self._run = bytearray()

    def push(self, token: str) -> str:
        """See `TokenDecoder.push`; holds a run of byte tokens to its end: one wrong byte spoils all."""
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            self._run.append(int(match.group(1), 16))
            return ""
        return self._leave(self._end_run() + token.replace(self._mark, " "))

    def flush(self) -> str:
        """See `TokenDecoder.flush`."""
        return self._leave(self._end_run())

    def fork(self) -> TokenDecoder:
        """See `TokenDecoder.fork`."""
        copied = SentencePieceDecoder(self._mark, self._strip)
        copied._run = bytearray(self._run)
        return copied

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _leave(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class DecoderRecipe:
    """How a tokenizer.json decodes; makes a fresh TokenDecoder for each answer."""

    def __init__(self, description: object) -> None:
        """Takes the `decoder` of a tokenizer.json. Raises FailedPrecondition for no known family."""
        self.byte_level = False
        self._mark = " "
        self._strip = False
        steps = _steps(description)
        kinds = [str(step.get("type")) for step in steps]
        if kinds == ["ByteLevel"]:
            self.byte_level = True
            return
        if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            raise FailedPrecondition("tokenizer.decoder", f"{kinds or 'none'} is not supported")
        pattern = steps[0].get("pattern")
        mark = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(mark, str) or steps[0].get("content") != " ":
            raise FailedPrecondition("tokenizer.decoder", "Replace must turn one string into a space")
        self._mark = mark
        if kinds[-1] == "Strip":
            strip = (steps[-1].get("content"), steps[-1].get("start"), steps[-1].get("stop"))
            if strip != (" ", 1, 0):
                raise FailedPrecondition("tokenizer.decoder", "Strip must take one leading space")
            self._strip = True

    def make(self) -> TokenDecoder:
        """A decoder at the start of an answer."""
        if self.byte_level:
            return ByteLevelDecoder()
        return SentencePieceDecoder(self._mark, self._strip)


def _steps(description: object) -> Sequence[Mapping[str, object]]:
    if not isinstance(description, dict):
        return []
    if description.get("type") == "Sequence":
        steps = description.get("decoders")
        return steps if isinstance(steps, list) else []
    return [description]
