"""What is wrong in the five broken engines: a replacement in one file of the engine each. Not for students.

DECOYS are other faults of the same file: a case that shows one of them, too, does not tell the causes apart. CASES are
ours: nobody needs many lines more.

The text that is replaced must occur exactly once; a test holds the engine's present source against it.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    old: str
    new: str


FAULTS = {
    1: Fault("cache_salt is not None or lora_id is not None", "lora_id is not None"),
    2: Fault("            block.ref_count += 1\n", "            block.ref_count = 1\n"),
    3: Fault(
        "            if budget == 0:\n                break\n            if seq in preempted:",
        "            if budget <= 1:\n                break\n            if seq in preempted:",
    ),
    4: Fault(
        "        for seq in dropped:\n            self.block_manager.free(seq)\n",
        "        for seq in dropped:\n            if seq in self.running:\n"
        "                self.block_manager.free(seq)\n",
    ),
    5: Fault("weights.cumsum(-1) - weights < wanted", "weights.cumsum(-1) < wanted"),
}

DECOYS = {
    1: Fault("cache_salt is not None or lora_id is not None", "cache_salt is not None"),
    2: Fault("min(len(hits) * self.block_size, len(seq.tokens) - 1)", "len(hits) * self.block_size"),
    3: Fault(
        "budget > 0 and len(self.running) < self.max_num_seqs:",
        "budget > 0 and len(self.running) < self.max_num_seqs - 1:",
    ),
    4: Fault(
        "        self.waiting = deque(seq for seq in self.waiting if seq.status is not SequenceStatus.FINISHED)\n", ""
    ),
    5: Fault("weights.cumsum(-1) - weights < wanted", "weights.cumsum(-1) - weights <= wanted"),
}
CASES = {
    1: "send a 1 salt=x: 1 2 3 4 5\nrun\nsend b 1 salt=y: 1 2 3 4 5\nrun\n",
    2: "send a 1: 1 2 3 4 5\nsend b 9: 1 2 3 4 6\nstep\n",
    3: "budget 1\nsend a 2: 1\nstep 2\n",
    4: "send a 9: 1 2 3\nstep\nleave a\n",
    5: "probs 0.6 0.3 0.1 top_p 0.5\n",
}
