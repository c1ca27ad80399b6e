"""Where a diagram's boxes and edges go: ranks from top to bottom, and the label of an edge in a rank that it passes."""

import textwrap
from dataclasses import dataclass, field
from itertools import pairwise

CHAR, LINE, GAP = 7.9, 18, 26  # pixels: a character's width, a line's height, the space between nodes


@dataclass(eq=False)
class Node:
    """A box with text, or a place that an edge passes in a rank (with its label, if it has one)."""

    lines: list[str]
    kind: str = "box"
    loop: list[str] = field(default_factory=list)  # label of the edge from the node to itself
    rank: int = 0
    x: float = 0.0
    y: float = 0.0  # of its middle

    @property
    def width(self) -> float:
        return 14.0 if self.kind == "dot" else max((len(line) for line in self.lines), default=0) * CHAR + 20

    @property
    def height(self) -> float:
        return 14.0 if self.kind == "dot" else len(self.lines) * LINE + (16 if self.kind == "box" else 4)

    @property
    def right(self) -> float:
        return self.width / 2 + (max(map(len, self.loop)) * CHAR + 30 if self.loop else 0)


@dataclass(eq=False)
class Edge:
    source: Node
    target: Node
    label: str = ""
    dashed: bool = False
    path: list[Node] = field(default_factory=list)  # from the upper end to the lower one


def arrange(nodes: list[Node], edges: list[Edge]) -> list[list[Node]]:
    """Give each node its rank, each edge its path, and each rank an order with few crossings."""
    for edge in edges:
        if edge.source is edge.target:
            edge.source.loop = textwrap.wrap(edge.label, 18)
    proper = [edge for edge in edges if edge.source is not edge.target]
    order: list[Node] = []  # against it, an edge closes a circle
    for start in sorted(nodes, key=lambda node: any(edge.target is node for edge in proper)):
        visit(start, proper, order, [])
    for edge in proper:
        edge.path = sorted((edge.source, edge.target), key=order.index)
    for node in order:
        above = [edge.path[0].rank + (2 if edge.label else 1) for edge in proper if edge.path[1] is node]
        node.rank = max(above, default=0)
    ranks: list[list[Node]] = [[] for _ in range(max(node.rank for node in nodes) + 1)]
    for node in order:
        ranks[node.rank].append(node)
    for edge in proper:
        upper, lower = edge.path
        passed = [Node([], "pass", rank=rank) for rank in range(upper.rank + 1, lower.rank)]
        if edge.label:
            passed[(len(passed) - 1) // 2].lines = textwrap.wrap(edge.label, 18)
        for node in passed:
            ranks[node.rank].append(node)
        edge.path = [upper, *passed, lower]
    for sweep in range(12):
        for rank in ranks if sweep % 2 else ranks[::-1]:
            places = {node: at for each in ranks for at, node in enumerate(each)}
            sizes = {node: len(each) for each in ranks for node in each}
            means = {node: mean([(places[n] + 0.5) / sizes[n] for n in beside(node, proper)], 0.5) for node in rank}
            rank.sort(key=means.__getitem__)
    return ranks


def visit(node: Node, edges: list[Edge], order: list[Node], path: list[Node]) -> None:
    """Depth first; afterwards a node stands before all that it leads to."""
    if node not in order and node not in path:
        for edge in reversed(edges):
            if edge.source is node:
                visit(edge.target, edges, order, [*path, node])
        order.insert(0, node)


def beside(node: Node, edges: list[Edge]) -> list[Node]:
    return [
        edge.path[at + step]
        for edge in edges
        for at, other in enumerate(edge.path)
        for step in (-1, 1)
        if other is node and 0 <= at + step < len(edge.path)
    ]


def mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def place(ranks: list[list[Node]], edges: list[Edge]) -> None:
    """Nodes move towards the middle of their neighbours, as far as those beside them leave room."""
    for _ in range(60):
        for rank in ranks:
            wanted = [mean([other.x for other in beside(node, edges)], node.x) for node in rank]
            gaps = [a.right + b.width / 2 + GAP * 0.7 for a, b in pairwise(rank)]
            low, high = wanted[:], wanted[:]
            for at, gap in enumerate(gaps):
                low[at + 1] = max(low[at + 1], low[at] + gap)
            for at in reversed(range(len(gaps))):
                high[at] = min(high[at], high[at + 1] - gaps[at])
            for node, a, b in zip(rank, low, high, strict=True):
                node.x = (a + b) / 2
    top = 2.0
    for rank in ranks:
        height = max(node.height for node in rank)
        for node in rank:
            node.y = top + height / 2
        top += height + GAP
    left = min(node.x - node.width / 2 for rank in ranks for node in rank) - 2
    for rank in ranks:
        for node in rank:
            node.x -= left
