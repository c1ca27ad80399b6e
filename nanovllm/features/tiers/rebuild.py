"""A directory put in order: a new index, of what segments say, and segments without holes."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track

from nanovllm.core.tiers.store import Record
from nanovllm.features.tiers.index import FILES, Index, Place, now_us
from nanovllm.features.tiers.segment import NAME, Segment, Space, remove_segment, segments_in


def new_index(directory: Path, own: Iterable[Space]) -> Index:
    """All records in whole chains, as if they had been used together, now. A large directory takes a while: with a bar.

    own: spaces of segments whose header may be damaged; others like that are removed.
    """
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    index = Index(directory)
    for space in own:
        Segment(directory, space).close()  # writes a header that was damaged
    spaces = []
    for path in segments_in(directory):
        if (space_of := Segment.space_of(path)) is None:
            remove_segment(path)
        else:
            spaces.append(space_of)
    sizes = [(directory / space.file_name).stat().st_size // space.slot_bytes for space in spaces]
    now, console = now_us(), Console(stderr=True)
    with index.writing():
        slots = all_slots(directory, index, spaces)
        for number, slot, record in track(slots, "a new index", sum(sizes), console=console, transient=True):
            if record is not None and not index.has(record.name):
                index.add(record, number, slot, now)
        index.remove_orphans()
    return index


def all_slots(directory: Path, index: Index, spaces: list[Space]) -> Iterator[tuple[int, int, Record | None]]:
    """(space, slot, what it says that it holds)."""
    for space in spaces:
        number, segment = index.add_space(space), Segment(directory, space)
        for slot, record in enumerate(segment.records()):
            yield number, slot, record
        segment.close()


def close_hole(directory: Path, index: Index, place: Place) -> int:
    """A slot is free: the last record of its file takes it. Returns by how many bytes the file is shorter."""
    file_name = index.spaces().get(place.space, "")
    if not NAME.fullmatch(file_name) or (space := Segment.space_of(directory / file_name)) is None:
        return 0
    segment = Segment(directory, space)
    try:
        before, last = segment.num_bytes, segment.num_slots - 1
        while last >= 0 and (name := index.in_slot(place.space, last)) is None:
            last -= 1
        if 0 <= place.slot < last:
            segment.copy(last, place.slot)
            index.move(Place(name, place.space, last), place.slot)  # type: ignore[arg-type]
            last -= 1
        segment.truncate(last + 1)
        return before - segment.num_bytes
    finally:
        segment.close()
