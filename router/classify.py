"""What kind of request is this? Rules over the prompt's text; pure, and cheap enough for the event loop.

The class only chooses drafter and draft length, so a wrong guess costs speed, never text.
"""

import re
from dataclasses import dataclass

from core.records import RequestClass

MAX_EXAMINED_CHARACTERS = 4000
"""Only that much of a prompt's beginning and end is looked at."""

_LONG_CHARACTERS = 800
"""A passage of that length before a question makes it retrieval; around an instruction, summarisation."""


@dataclass(frozen=True, slots=True)
class Classification:
    """A class and the rule that found it."""

    request_class: RequestClass
    reason: str


GRAMMAR_GIVEN = Classification("structured", "a grammar is given")
"""Of a request whose answer must follow a grammar, whatever its prompt says."""


def _rule(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE)


_TOOLS = _rule(
    r"\"?tool_calls?\"?\s*[:=]",
    r"\bfunction calls?\b",
    r"<tools?>",
    r"\bjson[\s_-]?schema\b",
    r"\"\$schema\"",
    r"\"parameters\"\s*:\s*\{",
)
_TRANSLATION = _rule(
    r"^\s*(please\s+)?translate\b",
    r"\btranslate\b[^.\n]{0,80}\b(in)?to\s+[A-Z]?[a-z]+",
    r"\b(in)?to (english|german|french|spanish|chinese|japanese|italian|russian|portuguese)\s*:",
)
_SUMMARY = _rule(
    r"\bsummari[sz]e\b",
    r"\bsummar(y|ies)\b",
    r"\btl;?dr\b",
    r"\bkey (points|takeaways)\b",
    r"\bin (your own|fewer) words\b.{0,30}\b(passage|article|text)\b",
    r"\bcondense\b",
)
_SUMMARY_EDGE = _rule(
    r"^\s*(please\s+)?(summari[sz]e|condense|tl;?dr|give (me )?a (short |brief )?summary)\b"
)
_STRUCTURED = _rule(
    r"\b(as|in|into|valid|a|return|output|generate|produce)\s+(an?\s+)?(\w+\s+){0,2}(json|yaml|xml|csv|toml)\b",
    r"\bjson\s+(object|array|list|format|dictionary|document)\b",
    r"\bmarkdown table\b",
    r"\bas a table\b",
    r"\btable with (the )?columns?\b",
    r"\bin the format of\b",
    r"\boutput (the answer )?in (the )?(\w+ )?format\b",
    r"\breturn (the|your) (answers?|results?|scores?) (as|in)\b",
    r"\bextract (the following|all|every|the)\b",
    r"\bone per line\b",
)
_CODE = _rule(
    r"^\s*(def|class|import|from|public|private|static|func|fn|const|let|var|#include|package)\s+[\w.<{(\"]",
    r"^\s*(async )?def \w+\(",
    r"\bcomplete the (following )?(\w+ )?function\b",
    r"\b(write|implement|develop|create|fix|debug|refactor|optimi[sz]e|complete|design)\b[^.\n]{0,60}"
    r"\b(function|program|script|code|class|algorithm|regex|query|website|api|unit tests?|method|module)\b",
    r"\b(in|using) (python|c\+\+|java|javascript|typescript|rust|golang|go|sql|html|css|bash)\b",
    r"\bsql query\b",
    r"\bstack trace\b",
    r"\bpull request\b",
    r"\bunit tests?\b",
)
_FENCE = re.compile(r"```\s*(\w*)")
_DATA_FENCES = frozenset({"json", "yaml", "xml", "csv", "toml"})
_REASONING = _rule(
    r"\bhow (many|much)\b.*\?",
    r"\bhow (long|far|old|fast)\b.*\?",
    r"\bstep[- ]by[- ]step\b",
    r"\bexplain your reasoning\b",
    r"\b(solve|prove|calculate|compute|derive|deduce)\b",
    r"\bwhat('s| is) the (probability|area|volume|value|remainder|total|sum|product|average|relation\w*)\b",
    r"\b(puzzle|riddle|theorem|equation|inequality)\b",
    r"\bwho is the (thief|liar|killer|murderer)\b",
    r"\bfind (the|all|f\()",
)
_PROVE = _rule(
    r"\b(solve|prove|step[- ]by[- ]step|riddle|puzzle|explain your reasoning|calculate|how many|how much)\b"
)
_CREATIVE = _rule(
    r"\b(write|compose|create|draft|invent|craft|tell)\b[^.\n]{0,60}"
    r"\b(story|poem|song|lyrics|haiku|limerick|blog post|essay|novel|tale|dialogue|scene|speech|slogan|headline"
    r"|screenplay|letter|fable|sonnet|email|advert\w*)\b",
    r"\b(creative|imagery|once upon a time)\b[^?]*$",
    r"\bbrainstorm\b",
    r"\bblog post\b",
)
_BATCH_ITEM = re.compile(r"^[ \t]*(?:\d+[.)]|[-*•]|\[\d+\])\s+\S", re.MULTILINE)
_BATCH = _rule(
    r"\bfor each of the following\b",
    r"\beach (of the following|item|line|row|entry|sentence|review)\b",
    r"\bclassify (each|every|the following)\b",
)
_BATCH_ITEMS = 8
_NUMBERS = re.compile(r"\$?\d+(?:[.,]\d+)?%?")


def classify(text: str) -> Classification:
    """The class of a prompt's text (of the user's last message in a chat). First rule that holds wins."""
    if len(text) > 2 * MAX_EXAMINED_CHARACTERS:
        text = text[:MAX_EXAMINED_CHARACTERS] + "\n" + text[-MAX_EXAMINED_CHARACTERS:]
    head, tail = text[:300], text[-300:]
    long = len(text) > _LONG_CHARACTERS
    if _TOOLS.search(text):
        return Classification("structured", "tools or schema")
    if _TRANSLATION.search(head):
        return Classification("translation", "asks for a translation")
    if _SUMMARY_EDGE.search(head) or (long and (_SUMMARY.search(head) or _SUMMARY.search(tail))):
        return Classification("summarisation", "asks for a summary")
    if len(_BATCH_ITEM.findall(text)) >= _BATCH_ITEMS and _BATCH.search(text):
        return Classification("batch", "one instruction over many items")
    if _STRUCTURED.search(head) or _STRUCTURED.search(tail):
        return Classification("structured", "asks for data in a format")
    if _is_code(text, head, tail):
        return Classification("code", "code in the prompt or asked for")
    return _classify_prose(text, head, tail, long)


def _is_code(text: str, head: str, tail: str) -> bool:
    if any(language.lower() not in _DATA_FENCES for language in _FENCE.findall(text)):
        return True
    lines = _CODE.search(head) or _CODE.search(tail)
    return lines is not None or re.search(r"^[ \t]*(def|class|func|fn) \w+", text, re.MULTILINE) is not None


def _classify_prose(text: str, head: str, tail: str, long: bool) -> Classification:
    if _CREATIVE.search(head):
        return Classification("creative", "asks for writing")
    instruction_at_edge = _PROVE.search(head[:120]) or _PROVE.search(tail)
    numbers = len(_NUMBERS.findall(text))
    if not long and _REASONING.search(text) and (numbers >= 2 or _PROVE.search(text)):
        return Classification("reasoning", "a problem to solve")
    if long and text.rstrip().endswith("?") and not instruction_at_edge:
        return Classification("summarisation", "a question behind a passage")
    if long and instruction_at_edge and numbers >= 2:
        return Classification("reasoning", "a problem to solve")
    return Classification("chat", "nothing more particular")
