"""Text comes out token by token exactly as it would at once."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from core.detokenizer import DecoderRecipe, byte_alphabet
from core.errors import FailedPrecondition
from core.tokenizer import IncrementalDetokenizer, Tokenizer


def _byte_level() -> FastTokenizer:
    """All bytes, a few merges that cut characters apart, one special and one plain added token."""
    characters = {character: number for number, (character, _) in enumerate(sorted(byte_alphabet().items()))}
    by_byte = {byte: character for character, byte in byte_alphabet().items()}
    smile = [by_byte[byte] for byte in "🙂".encode()]
    merged = {smile[0] + smile[1]: 256, by_byte[0x20] + by_byte[0x61]: 257}
    fast = FastTokenizer(
        models.BPE(
            vocab={**characters, **merged}, merges=[(smile[0], smile[1]), (by_byte[0x20], by_byte[0x61])]
        )
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>"])
    fast.add_tokens(["<plain ü>"])
    return fast


def _sentencepiece(strip: bool) -> FastTokenizer:
    pieces = ["▁", "a", "▁b", "c▁", "é", "▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = FastTokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    fast.add_special_tokens(["<s>"])
    return fast


FAMILIES = {
    "byte level": _byte_level(),
    "sentencepiece": _sentencepiece(False),
    "stripping": _sentencepiece(True),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    loaded = {}
    for name, fast in FAMILIES.items():
        directory = tmp_path_factory.mktemp("tokenizer")
        fast.save(str(directory / "tokenizer.json"))
        loaded[name] = Tokenizer.from_directory(directory)
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip_special", [True, False])
def test_pushes_and_flush_join_to_what_the_library_decodes(
    tokenizers: dict[str, Tokenizer], family: str, skip_special: bool
) -> None:
    tokenizer, fast = tokenizers[family], FAMILIES[family]
    chance = random.Random(3)
    for _ in range(2000):
        ids = [chance.randrange(tokenizer.vocab_size + 2) for _ in range(chance.randrange(12))]
        expected = fast.decode(ids, skip_special_tokens=skip_special)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join([*pieces, detokenizer.flush()]) == expected
        assert tokenizer.decode(ids, skip_special) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_goes_on_as_the_one_it_was_made_of_and_leaves_it_alone(
    tokenizers: dict[str, Tokenizer], family: str
) -> None:
    tokenizer = tokenizers[family]
    chance = random.Random(4)
    for _ in range(500):
        ids, other = ([chance.randrange(tokenizer.vocab_size) for _ in range(8)] for _ in range(2))
        first = IncrementalDetokenizer(tokenizer)
        before = first.push(ids[:4])
        fork = first.fork()
        assert before + fork.push(other) + fork.flush() == tokenizer.decode(ids[:4] + other)
        assert before + first.push(ids[4:]) + first.flush() == tokenizer.decode(ids)


@given(text=st.text())
def test_any_text_survives_encoding_and_streaming(text: str) -> None:
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    decoder = DecoderRecipe({"type": "ByteLevel"}).make()
    pieces = [decoder.push(alphabet[byte]) for byte in text.encode()]
    assert "".join(pieces) + decoder.flush() == text


def test_part_of_a_character_is_held_until_it_is_whole(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte level"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode("🙂!")]
    assert pieces == ["", "", "🙂", "!"]


def test_part_of_a_character_at_the_end_becomes_a_replacement(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = IncrementalDetokenizer(tokenizers["byte level"])
    assert detokenizer.push(tokenizers["byte level"].encode("🙂")[:1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_bytes_that_never_become_a_character_are_not_held(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte level"]
    continuation = tokenizer.encode("é")[1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([continuation]) for _ in range(1000)) == "\ufffd" * 1000


def test_special_tokens_are_skipped_or_shown(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte level"]
    ids = tokenizer.encode("a<|end|><plain ü>")
    assert tokenizer.decode(ids) == "a<plain ü>"
    assert tokenizer.decode(ids, skip_special=False) == "a<|end|><plain ü>"
    assert tokenizer.token_text(ids[1]) == "<|end|>"
    assert tokenizer.token_bytes(ids[0]) == b"a"


@pytest.mark.parametrize(
    "description",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 2, "stop": 0},
            ],
        },
    ],
)
def test_a_decoder_of_no_known_family_is_refused(description: object) -> None:
    with pytest.raises(FailedPrecondition, match="decoder"):
        DecoderRecipe(description)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}}')
    with pytest.raises(FailedPrecondition, match="tokenizer"):
        Tokenizer.from_directory(tmp_path)
