"""A deployment whose decode worker hosts every drafter: made in a folder, with a TOML file of settings."""

import json
from collections.abc import Mapping
from pathlib import Path

from core.tokenizer import Tokenizer
from decode.drafters.corpus import CorpusWriter, documents_of
from decode.drafters.shipped_heads import shipped_heads
from decode.drafters.vocabulary import vocabulary_digest
from engine.truncate import truncate_model
from engine.weights import open_model

EXACT = (
    *("ngram", "draft_model", "cache", "rest", "lookahead", "layerskip", "medusa", "mtp"),
    *("eagle", "eagle2", "eagle3", "specinfer", "sequoia", "recursive"),
)
"""Every name that a request may give and that keeps the answer's text, but `none` and `pass`."""
APPROXIMATE = ("bild", "cascade")
TREES = frozenset(EXACT) - {"lookahead", "layerskip", "eagle", "recursive"}
DRAFT_LAYERS = 24
_ROOT = Path(__file__).parents[2]
_TEXTS = ("core", "engine", "decode", "prefill", "router", "cluster", "docs")
_HEADS = {
    "eagle": "eagle",
    "eagle2": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "medusa": "medusa",
    "layerskip": "exit",
}


def full_house(work: Path, model: Path, heads: Path | None) -> Path:
    """Writes what the drafters need under `work`; the path of the settings.

    `heads`: a folder of artifacts by kind, for those that do not ship. Raises FileNotFoundError naming what is missing.
    """
    shipped = shipped_heads(open_model(model).revision())
    own = {} if heads is None else {path.parent.name: path.parent for path in heads.glob("*/manifest.json")}
    found = shipped | own
    missing = sorted(set(_HEADS.values()) - found.keys())
    if missing:
        raise FileNotFoundError(
            f"no head of the kinds {', '.join(missing)} ships for {model}; name --heads FOLDER"
        )
    sections: dict[str, Mapping[str, object]] = {
        name: {"artifact": str(found[kind])} for name, kind in _HEADS.items()
    }
    sections["draft_model"] = {"model": str(truncate_model(model, DRAFT_LAYERS, work / "draft"))}
    sections["rest"] = {"corpus": str(_corpus(work / "corpus", model))}
    sections["specinfer"] = {"members": ["ngram", "eagle3"]}
    sections["sequoia"] = {"base": "eagle3"}
    sections["recursive"] = {}
    for name in APPROXIMATE:
        sections[name] = {}
    path = work / "full_house.toml"
    path.write_text("\n".join(_section(name, values) for name, values in sections.items()))
    return path


def _corpus(folder: Path, model: Path) -> Path:
    """The project's own sources and documents."""
    tokenizer = Tokenizer.from_directory(model)
    paths = [
        path for part in _TEXTS for form in ("*.py", "*.md") for path in sorted((_ROOT / part).rglob(form))
    ]
    with CorpusWriter(
        folder, vocabulary_digest(tokenizer), tokenizer.vocab_size, lambda line: None
    ) as writer:
        for text in documents_of(paths):
            writer.add(tokenizer.encode(text))
        writer.close()
    return folder


def _section(name: str, values: Mapping[str, object]) -> str:
    lines = [f"[decode_worker.drafters.{name}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
