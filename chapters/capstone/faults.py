"""What is wrong in the five broken engines: a replacement in one file of the engine each. Not for students.

The text that is replaced must occur exactly once; a test holds the engine's present source against it.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    old: str
    new: str


FAULTS = {
    1: Fault("(cache_salt, lora_id) != (None, None)", "lora_id is not None"),
    2: Fault("            block.ref_count += 1\n", "            block.ref_count = 1\n"),
    3: Fault("if budget == 0 or seq in preempted:", "if budget <= 1 or seq in preempted:"),
    4: Fault(
        "        for seq in dropped:\n            self.block_manager.free(seq)\n",
        "        for seq in dropped:\n            if seq in self.running:\n"
        "                self.block_manager.free(seq)\n",
    ),
    5: Fault("probs.cumsum(-1) - probs < wanted", "probs.cumsum(-1) < wanted"),
}
