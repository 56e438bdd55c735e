"""What the demo asks: four prompts of different kinds, and the drafters that each is asked with."""

from dataclasses import dataclass

DRAFTERS: dict[str, int | None] = {
    "none": None,
    "ngram": 8,
    "eagle3": None,
    "medusa": None,
    "draft_model": 2,
    "auto": None,
}
"""Each with the draft length asked for; with None the worker's controller moves it, as measured speed tells."""
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One prompt. A temperature above 0 is sampled, with the seed."""

    title: str
    text: str
    temperature: float
    seed: int


PROMPTS = (
    DemoPrompt(
        "structured",
        "Repeat this list as JSON, one object for each line, with the keys name, city and age:\n"
        "Ines Duarte, Porto, 34\nTom Okafor, Lagos, 41\nLena Brandt, Kiel, 29",
        temperature=0.0,
        seed=1,
    ),
    DemoPrompt(
        "code",
        "Rename the parameter `items` to `values` and return the whole function:\n\n"
        "def chunks(items, size):\n    result = []\n    for start in range(0, len(items), size):\n"
        "        result.append(items[start:start + size])\n    return result",
        temperature=0.0,
        seed=2,
    ),
    DemoPrompt(
        "summary",
        "Summarise in two sentences: The night train from the capital to the coast returns after seventeen "
        "years. It leaves every evening at 21:48 and reaches the harbour at 7:12 the next morning, with stops "
        "in five towns. The operator has rebuilt thirty used sleeping cars in its own workshop. A bed costs "
        "between 39 and 119, depending on the day and on how early it is booked. Travellers' associations "
        "welcome the night train but point out that the connection to the morning ferry is tight.",
        temperature=0.0,
        seed=3,
    ),
    DemoPrompt(
        "creative",
        "Write the first lines of a story about a lighthouse keeper who finds a letter.",
        temperature=0.8,
        seed=4,
    ),
)
