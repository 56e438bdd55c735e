"""How user turns begin: the target goes on from there, so that every class of requests occurs. Written for Outrider."""

from typing import Final

OPENINGS: Final[dict[str, tuple[str, ...]]] = {
    "chat": (
        "Hi! I have been thinking about",
        "Can you give me some advice on how to",
        "You are a friendly guide. A visitor asks you about",
        "I am new to my town and would like to",
        "What do you think is the best way to",
        "Please help me plan",
        "My friend told me that",
        "",
    ),
    "code": (
        "Write a Python function that",
        "Here is a Python function:\n\n```python\ndef ",
        "Fix the bug in this code:\n\n```python\n",
        "Explain what this JavaScript does:\n\n```javascript\n",
        "Write a SQL query that",
        "Add a docstring and type hints to this function:\n\n```python\ndef ",
        "Write a class in Java for",
        "Write unit tests for this function:\n\n```python\ndef ",
    ),
    "structured": (
        "Return a JSON object with the fields",
        "Extract the names and dates from this text as JSON:\n\n",
        "Make a Markdown table of",
        "Turn this list into CSV:\n\n- ",
        "Fill in this form as YAML:\n\nname: ",
        "List the following as numbered steps:",
    ),
    "summarisation": (
        "Summarise the following article in three sentences:\n\n",
        "Give me the main points of this text:\n\n",
        "Write a short abstract of this report:\n\n",
        "What is the following message about? Be brief.\n\n",
        "Condense this paragraph:\n\n",
    ),
    "rag": (
        "Answer the question from the passage.\n\nPassage: ",
        "Use only these documents to answer.\n\n[1] ",
        "Context:\n",
        "Read the text below and then tell me what it says about",
        "According to the following text, ",
    ),
    "translation": (
        "Translate into English: ",
        "Translate this sentence into French: ",
        "Translate German to English: ",
        "How do you say this in Spanish: ",
        "Translate into Italian and explain the grammar: ",
    ),
    "reasoning": (
        "A farmer has",
        "Solve step by step: if",
        "If a train leaves at",
        "Which is larger,",
        "Think carefully. Three friends",
        "A shop sells",
        "Prove that",
    ),
    "qa": (
        "What is the capital of",
        "Who invented",
        "When did",
        "Why does",
        "How many",
        "Which country",
        "Where is",
        "Who wrote",
    ),
    "creative": (
        "Write a short story about",
        "Write a poem about",
        "Describe a character who",
        "Compose a letter from",
        "Invent a dialogue between",
    ),
}
CLASSES: Final = tuple(OPENINGS)


def opening(number: int) -> tuple[str, str]:
    """(class, first words) of rollout `number`: the classes in turn, then each class's openings in turn."""
    name = CLASSES[number % len(CLASSES)]
    known = OPENINGS[name]
    return name, known[number // len(CLASSES) % len(known)]
