"""The lab's last part: the same requests preempted, drafted, and computed again after failures."""

from typing import Any

from chapters.ch13_guess_and_check.again import Played, hat, noise
from chapters.draw import make_table
from chapters.story import Story

SMALL = 18  # blocks
HAPPENS: dict[str, dict[str, Any]] = {
    "room for all": {},
    "a small pool": {"num_blocks": SMALL},
    "three draft tokens": {"num_draft_tokens": 3},
    "every ninth step fails": {"fails": True},
    "all three": {"num_blocks": SMALL, "num_draft_tokens": 3, "fails": True},
}


def tell_again(story: Story) -> None:
    story.part("Computed again")
    played = Played()
    pools = f"{len(played.scheduler.block_manager.blocks)} blocks, and {SMALL} in a small pool"
    story.say(
        f"The scheduler and the block manager are the engine's, and the model is a rule: which token comes depends on "
        f"the tokens before it and on a number. {len(played.seqs)} sequences, two samples each of "
        f"{len(played.seqs) // 2} requests, get 20 tokens each. The pool has {pools}. One in three draft tokens is "
        "wrong. After a step that fails all sequences wait, and the pool is forgotten. The last two columns: how "
        "many answers are those of the first line, if the number is a hash of seed, sample index and position in the "
        "output, and if each draw takes the next number of one generator, the hat."
    )
    table = make_table("", "preempted", "failed", "tokens computed", "hash", "hat", width=10, first=24)
    expected: dict[str, list[list[int]]] = {}
    for name, options in HAPPENS.items():
        same = []
        for draw_name, draw in (("hat", hat()), ("hash", noise)):
            played = Played(draw=draw, **options)
            answers = played.answers()
            pairs = zip(answers, expected.setdefault(draw_name, answers), strict=True)
            same.append(f"{sum(ours == theirs for ours, theirs in pairs)} of {len(answers)}")
        counts = played.num_preemptions, played.num_failures, played.num_computed_tokens
        table.add_row(name, *map(str, counts), *reversed(same))
    story.show(table)
