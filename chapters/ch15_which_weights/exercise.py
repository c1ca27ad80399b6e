"""Exercises of chapter 15. Edit this file, then:  python -m chapters check 15

You write three functions with which the real engine then computes. The tasks are independent of each other.
"""

import torch  # noqa: F401 (you will need it)
from torch import Tensor

from nanovllm.features.lora.adapter_rows import LoRAWeights


def add_adapters(y: Tensor, x: Tensor, slots: Tensor, weights: LoRAWeights) -> None:
    """Add the corrections of the rows' adapters to a linear layer's output: y += B (A x), in place.

        y        [T, out]  the product with the base weights. Change it; return nothing
        x        [T, in]   the layer's input
        slots    [T]       the slot of the adapter that each row meets; -1: it meets none, and its row of y stays
        weights  of this layer, for the adapters in all slots:
            a          [num_slots, num_parts, max_rank, at least in]. Only the first `in` numbers of a row belong to
                       A; the numbers after them are padding
            b          [num_slots, max_rank, out]. B, transposed and already multiplied by the adapter's scale
            out_sizes  the layer may be several projections in one (q, k and v): the number of columns of y that
                       belong to each, in order. Part p has an A of its own, a[slot, p], for its columns of b
        Ranks that an adapter does not have are zeros in a and b.

    For a row of x with slot s, the columns of part p get  x A^T B^T  with A = a[s, p] and the same columns of b[s].

    A step has many rows, and rows of one adapter need not be neighbors. Multiply all rows of an adapter together: the
    number of matrix products must not grow with T. And never compute the product B A: it is as large as the base
    weight. Nothing is computed for rows without an adapter, or for slots that no row meets.

    x and y may be bf16. Then compute in float32, and round once, when the sum goes into y.
    """
    raise NotImplementedError


def slot_for(slots: dict[int, int], lora_id: int, needed: set[int], num_slots: int) -> int:
    """The slot that this adapter has from now on. The engine asks for each adapter of a step, before the step.

        slots      {id of an adapter: its slot} of the adapters that are in memory, the least recently used first
        lora_id    the adapter that is needed now
        needed     ids of all adapters of this step, this one among them: at most num_slots
        num_slots  there are slots 0 to num_slots - 1

    If the adapter has a slot, it keeps it. Otherwise it gets the free slot with the smallest number. If no slot is
    free, it gets the slot of the least recently used adapter that this step does not need. The adapter that loses its
    slot leaves `slots`.

    Afterwards this adapter is the most recently used: the last one in `slots`. (A dict keeps the order in which keys
    were put in; to put a key at the end, take it out first.) Return its slot. The engine copies the adapter into
    the slot if the adapter was not in `slots` before.
    """
    raise NotImplementedError


def id_of_weights(ids: dict[tuple[int, str], int], number: int, digest: str) -> int:
    """The id that stands for an adapter's weights: in block hashes, in slots, wherever the engine tells adapters apart.

        ids     {(number, digest): id} of all weights that requests have named since the engine started. Enter these
        number  what the request calls its adapter (lora_int_id), from 1 to 2**31 - 1
        digest  of the weights that the number stands for now, a text

    An adapter may be replaced while requests use it: somebody trains it further, writes the new files into the same
    folder, and a request says load_inplace=True. From then on its number stands for other weights. Requests that have
    begun with the earlier ones end with them, in the same steps as new requests that have the new ones. And it may be
    replaced again, also by weights that the number has stood for before.

    Decide which id to give, so that

    - the rows of a step find their own weights (the engine keeps a slot for each id), and no request finds K and V of
      other weights in the cache (block hashes contain the id), now or ever after;
    - weights that come back under their number find the K and V that were computed with them;
    - an adapter that is never replaced has its own number as id, which people see in reports. Other numbers may be
      named at any time, so nothing else may have an id that is a number: ids of your own begin at 2**31;
    - two numbers may stand for equal weights. Each has an id of its own.

    Enter the id into `ids` if it is not there, change nothing else in it, and return the id.

    Example: ids is empty. (7, "aa") gets 7. Then (7, "bb") gets 2147483648, and (7, "aa") gets 7 again.
    """
    raise NotImplementedError
