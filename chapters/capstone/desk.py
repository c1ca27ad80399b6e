"""Desk: makes views of the server's messages, asks the policy, and sends back what it decided.

Whatever the policy returns goes back as it is: the server's side judges it (seams.py).
"""

from typing import Any

from chapters.capstone.views import Block, Request, Setup, State

LISTS = ("waiting", "running")


class Desk:
    """policy_class: of the student's file. setup: the fields of Setup."""

    def __init__(self, policy_class: Any, setup: list[Any]) -> None:
        self.policy = policy_class(Setup(*setup))
        self.known: dict[int, list[Any]] = {}  # id -> what does not change of a request
        self.shown: dict[int, tuple[Any, Request]] = {}  # id -> what was last said of it, and what that made

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if "snapshots" in message:
            return {"snapshots": self.policy.snapshots(*message["snapshots"])}
        for request_id, *fixed in message["new"]:
            self.known[request_id] = fixed
        waiting, running = (tuple(map(self._request, message[name])) for name in LISTS)
        self.known = {request.id: self.known[request.id] for request in waiting + running}
        self.shown = {request.id: self.shown[request.id] for request in waiting + running}
        state = State(message["now"], waiting, running, message["free"])
        refused = self.policy.refuse(state)
        if refused and isinstance(refused, list):
            gone = {index for index in refused if type(index) is int}
            state = state._replace(waiting=tuple(request for request in waiting if request.id not in gone))
        return {
            "refuse": refused,
            "order": self.policy.order(state),
            "token_budget": self.policy.token_budget(state),
            "num_draft_tokens": self.policy.num_draft_tokens(state),
            "worth": [self.policy.worth(state, Block(*block)) for block in message["released"]],
        }

    def _request(self, row: Any) -> Request:
        """Most of those who wait are as they were a step ago."""
        last = self.shown.get(row[0])
        if last is None or last[0] != row:
            last = row, Request(row[0], *self.known[row[0]], *row[1:])
            self.shown[row[0]] = last
        return last[1]
