"""A question that a program answers with a tool."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tests.serving.clients.conftest import WEATHER

QUESTION = "What is the weather in Oslo?"
USER = [{"role": "user", "content": QUESTION}]
BRIEF: dict[str, Any] = dict(temperature=0, max_tokens=40)
City = Literal["Oslo", "Rome"]


class Report(BaseModel):
    """How it is outside."""

    model_config = ConfigDict(extra="forbid")  # else a small model goes on with members of its own
    city: City
    is_wet: bool


def weather(city: City) -> str:
    """The weather in a city, now."""
    assert city == "Oslo"
    return WEATHER
