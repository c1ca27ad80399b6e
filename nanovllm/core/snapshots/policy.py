"""Where snapshots are taken (chapter 16). Of a hybrid model a prompt can be continued only where there is one.

A snapshot of a small model takes as much memory as K/V of 1,500 tokens, so not every block can have one. Some positions
are known to be wanted: where a prompt ends, the next turn of a chat begins; where a prompt leaves the blocks that are
cached, the next prompt that leaves them there begins. Other positions are chosen so that prompts agree on them
without having met: powers of two blocks, and where falling powers of two add up to the prompt. Prompts of 5,200 and of
5,900 tokens both pass 256, 512, 1,024, 2,048, 4,096 = 2^12 and 5,120 = 2^12 + 2^10.
"""

from collections.abc import Callable

Policy = Callable[[int, int, int], dict[int, bool]]

SMALLEST_POWER = 16  # blocks


def snapshot_positions(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
    """{position: is it known to be wanted?} of a sequence that is admitted with num_tokens tokens.

    num_matched: tokens at its beginning whose blocks were found in the cache, with a snapshot or without.
    """
    num_blocks = (num_tokens - 1) // block_size  # one token, at least, is left to be computed
    wanted, power, reached = dict[int, bool](), 1 << num_blocks.bit_length() >> 1, 0
    while power >= SMALLEST_POWER:
        wanted[power * block_size] = False
        if num_blocks & power:
            reached += power
            wanted[reached * block_size] = False
        power >>= 1
    for position in (num_matched, num_blocks * block_size):
        wanted[min(position, num_blocks * block_size)] = True
    return wanted
