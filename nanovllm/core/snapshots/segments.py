"""A step's segments as numbers: what the data plane is told of states (chapter 16)."""

from typing import TYPE_CHECKING

from nanovllm.core.snapshots.state import NOTHING_READ

if TYPE_CHECKING:
    from nanovllm.core.scheduler import ScheduledChunk

DISCARDED = -1  # in place of a slot: nobody keeps the state after draft tokens


def step_segments(chunks: "list[ScheduledChunk]") -> list[list[int]]:
    """[S, 8]: source, target, log slot, first row in the log, rows from there, first row of the batch, rows from there,
    are these kept in the log?

    The state takes in known tokens only. A step writes what it read of its draft tokens into the log of the
    sequence's slot. The next step begins with the accepted ones: it takes them from the log, for their rows have been
    computed.

        tokens       [ in the state | accepted drafts | this chunk, known | draft tokens ]
        taken from                    log               batch               batch, for their outputs only; to the log
    """
    table, row = [], 0
    for chunk in chunks:
        state, begin = chunk.seq.parts["state"], chunk.start
        assert state is not None
        for start, end, source, target in state.segments:
            logged, first = max(min(end, begin) - start, 0), max(start, begin)
            rows = row + first - begin, max(end - first, 0)
            table.append([source, target, state.slot, start - state.segments[0].start, logged, *rows, 0])
        if chunk.draft_token_ids:
            rows = row + chunk.known_end - begin, len(chunk.draft_token_ids)
            table.append([state.source, DISCARDED, state.slot, 0, 0, *rows, 1])
        row += chunk.end - begin
    return table


def fresh_segments(query_lens: list[int]) -> list[list[int]]:
    """Segments of sequences that begin and end with this step: nobody keeps their states."""
    table, row = [], 0
    for num_rows in query_lens:
        table.append([NOTHING_READ, DISCARDED, 0, 0, 0, row, num_rows, 0])
        row += num_rows
    return table
