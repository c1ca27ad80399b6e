"""StepTimes: what a step of so many rows takes, learned from the steps that are made anyway (chapter 13)."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median

NUM_TIMES = 5  # steps of one size whose median is their time
MAX_AGE = 200  # steps; what was measured before is forgotten, for machines get busy and quiet


class StepTimes:
    """Seconds of steps by their number of rows, as measured. Sizes that are nearly alike count together.

    A step with draft tokens may take another way than one without of the same size (CUDA graphs), so they count apart.
    """

    def __init__(self) -> None:
        # with drafts or without -> size -> its seconds, its rows, the step when it was measured last
        self._times: dict[bool, dict[int, tuple[deque[float], int, int]]] = {False: {}, True: {}}
        self._num_steps = 0

    def add(self, num_rows: int, seconds: float, has_drafts: bool) -> None:
        self._num_steps += 1
        octave = num_rows.bit_length()
        size = num_rows if octave < 4 else 4 * octave + (num_rows >> octave - 3)  # from 8 on, four in an octave
        times = self._times[has_drafts].pop(size, (deque(maxlen=NUM_TIMES),))[0]
        times.append(seconds)
        self._times[has_drafts][size] = times, num_rows, self._num_steps
        for sizes in self._times.values():
            for old in [s for s, (*_, step) in sizes.items() if step <= self._num_steps - MAX_AGE]:
                del sizes[old]

    def plain(self, num_rows: int) -> float | None:
        """Seconds of a step without draft tokens. None: nothing so small has been measured."""
        points = self._points(self._times[False])
        return line(points, num_rows) if points and points[0][0] <= num_rows else None

    def with_drafts(self) -> Callable[[int], float]:
        """Seconds of a step with draft tokens, by its rows. What was not measured is assumed to be as without them."""
        points = self._points(self._times[False] | self._times[True])
        return lambda num_rows: line(points, num_rows)

    def num_rows_to_try(self, num_rows: int) -> int:
        """What a step of more rows than were ever measured takes is found out in small paces."""
        largest = max((rows for sizes in self._times.values() for _, rows, _ in sizes.values()), default=0)
        return max(num_rows, largest) * 5 // 4 + 4

    @staticmethod
    def _points(sizes: dict[int, tuple[deque[float], int, int]]) -> list[tuple[int, float]]:
        return sorted((rows, median(times)) for times, rows, _ in sizes.values())


def line(points: list[tuple[int, float]], x: int) -> float:
    """The height at x of the line through points, which are in order; level before the first and after the last."""
    i = bisect_left(points, (x, 0.0))
    (x0, y0), (x1, y1) = points[max(i - 1, 0)], points[min(i, len(points) - 1)]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x0 < x <= x1 else y1
