"""What the simulator of chapter 7 is asked, and what it answers."""

from collections.abc import Iterator
from itertools import count

SYSTEM = "you keep a small lighthouse answer in short clear words and stay polite"
QUESTIONS = (
    "who lights the lamp at night",
    "how far does the light reach",
    "who lights the lamp in winter when it snows",
    "may I visit",
    "how many steps lead up to the lamp",
)
INSTRUCTIONS = "answer from this page"
PAGES = (
    "page one the tower was built of grey stone by forty men",
    "page two the keeper has a boat a dog and nine hens",
    "page three in winter the supply ship comes once a month",
)
STORIES = (
    "a train left the valley at dawn with no one aboard",
    "bake the bread until its crust sounds hollow",
    "seven lamps hung over the bridge and none was lit",
    "write the name of the river that runs past your house",
)
ANSWER = "yes the lamp is lit and the boats come home before the fog is here".split()
WORKLOADS = ("one system prompt", "a conversation", "pages and questions", "nothing shared")


def prompts(workload: str, answers: list[str]) -> Iterator[str]:
    """Texts without end. answers: of the requests so far, filled in as they end (a conversation needs the last)."""
    history = ""
    for number in count():
        question = QUESTIONS[number % len(QUESTIONS)]
        if workload == "one system prompt":
            yield f"{SYSTEM} {question}"
        elif workload == "a conversation":
            history = f"{history} {answers[-1] if answers else ''} {question}" if number else f"{SYSTEM} {question}"
            yield history
        elif workload == "pages and questions":
            yield f"{INSTRUCTIONS} {PAGES[number * 2 % len(PAGES)]} {question}"
        else:
            yield f"story-{number} {STORIES[number % len(STORIES)]}"
