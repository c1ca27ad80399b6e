"""The lab's last part: the same requests preempted, drafted, and computed again after failures."""

from typing import Any

SMALL = 18  # blocks
HAPPENS: dict[str, dict[str, Any]] = {
    "room for all": {},
    "a small pool": {"num_blocks": SMALL},
    "three draft tokens": {"num_draft_tokens": 3},
    "every ninth step fails": {"fails": True},
    "all three": {"num_blocks": SMALL, "num_draft_tokens": 3, "fails": True},
}
