"""The mermaid diagrams of the texts as SVG, drawn when the site is built: the kinds that the chapters use.

A flowchart or state diagram is drawn from top to bottom, which fits a page's column: nodes in ranks, so that edges
lead down (but for those that close a circle), and an edge's label has a place of its own in the ranks it passes.
"""

import html
import re
import textwrap
from itertools import pairwise

from chapters.site.diagram_layout import LINE, Edge, Node, arrange, beside, place
from chapters.site.sequence_diagram import draw_sequence

ARROW = re.compile(r"\s+(?:--\s+(?P<label>.+?)\s+-->|-->|-\.->)\s+")
NODE = re.compile(r'(\w+)\s*(?:(?:\[\(|\(\(|\[)"?(.*?)"?(?:\)\]|\)\)|\]))?$')
START, END = "[*] start", "[*] end"


def draw(source: str) -> str:
    kind = source.split()[0]
    if kind == "sequenceDiagram":
        return figure(*draw_sequence(source))
    if kind not in ("flowchart", "stateDiagram-v2"):
        raise ValueError(f"only flowchart, stateDiagram-v2 and sequenceDiagram can be drawn, found {kind!r}")
    nodes, edges = parse_flowchart(source) if kind == "flowchart" else parse_states(source)
    said = "; ".join(
        f"{' '.join(edge.source.lines) or 'start'} to {' '.join(edge.target.lines) or 'end'}"
        + (f": {edge.label}" if edge.label else "")
        for edge in edges
    )
    ranks = arrange(nodes, edges)
    place(ranks, edges)
    return figure(svg(ranks, edges), said)


def figure(drawing: str, said: str) -> str:
    name = html.escape(f"Diagram. {said}")
    drawing = drawing.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
    return f'<div class="diagram" tabindex="0" role="region" aria-label="diagram">{drawing}</div>\n'


# -- reading --------------------------------------------------------------------------------------------------------


def parse_flowchart(source: str) -> tuple[list[Node], list[Edge]]:
    nodes: dict[str, Node] = {}
    edges = []

    def node_of(text: str) -> Node:
        match = NODE.match(text.strip())
        if match is None:
            raise ValueError(f"no node of a flowchart: {text!r}")
        name, label = match.groups()
        if name not in nodes or label:
            found = nodes.setdefault(name, Node([]))
            found.lines = [part for line in (label or name).split("<br/>") for part in textwrap.wrap(line, 26)]
        return nodes[name]

    for line in source.splitlines()[1:]:
        at, before = 0, None
        for arrow in [*ARROW.finditer(line), None]:
            node = node_of(line[at : arrow.start() if arrow else None])
            if before is not None:
                edges.append(Edge(before[0], node, before[1]["label"] or "", "." in before[1][0]))
            if arrow:
                at, before = arrow.end(), (node, arrow)
    return list(nodes.values()), edges


def parse_states(source: str) -> tuple[list[Node], list[Edge]]:
    nodes: dict[str, Node] = {}
    edges = []
    for line in map(str.strip, source.splitlines()[1:]):
        if named := re.match(r'state "(.*)" as (\w+)', line):
            nodes[named[2]] = Node(textwrap.wrap(named[1], 26))
        elif arrow := re.match(r"(\S+) --> ([^\s:]+)(?:: (.*))?$", line):
            ends = arrow[1].replace("[*]", START), arrow[2].replace("[*]", END)
            for name in ends:
                nodes.setdefault(name, Node([], "dot") if "[*]" in name else Node([name]))
            edges.append(Edge(nodes[ends[0]], nodes[ends[1]], arrow[3] or ""))
    return list(nodes.values()), edges


# -- drawing --------------------------------------------------------------------------------------------------------


def svg(ranks: list[list[Node]], edges: list[Edge]) -> str:
    nodes = [node for rank in ranks for node in rank]
    width = max(node.x + node.right for node in nodes) + 4
    height = max(node.y + node.height / 2 for node in nodes) + 4
    parts = [edge_svg(edge, edges) for edge in edges if edge.path]
    parts += [node_svg(node) for node in nodes if node.kind != "pass" or node.lines]
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>'
    )


def port(node: Node, neighbour: Node, edges: list[Edge]) -> float:
    """Where on its upper or lower side a node's edge begins: in the order of where the edges lead."""
    below = neighbour.rank > node.rank
    others = [other for other in beside(node, edges) if (other.rank > node.rank) == below]
    others.sort(key=lambda other: other.x)
    step = min(24.0, node.width / (len(others) + 1))
    return node.x + (others.index(neighbour) - (len(others) - 1) / 2) * (step if node.kind == "box" else 0)


def edge_svg(edge: Edge, edges: list[Edge]) -> str:
    path, down = edge.path, edge.target is edge.path[-1]
    x, y = port(path[0], path[1], edges), path[0].y + path[0].height / 2
    tip = f"M{x:.1f} {y:.1f}l-4 8h8z"
    y += 0 if down else 8
    way = f"M{x:.1f} {y:.1f}"
    for before, node in pairwise(path):
        last = node is path[-1]
        end_x = port(node, before, edges) if last else node.x
        end_y = node.y - node.height / 2 - (8 if last and down else 0)
        middle = (y + end_y) / 2
        way += f"C{x:.1f} {middle:.1f} {end_x:.1f} {middle:.1f} {end_x:.1f} {end_y:.1f}"
        x, y = end_x, end_y
        if not last:
            y = node.y + node.height / 2
            way += f"M{x:.1f} {y:.1f}" if node.lines else f"V{y:.1f}"  # room for the label
    if down:
        tip = f"M{x:.1f} {y + 8:.1f}l-4 -8h8z"
    return f'<path class="wire{" dashed" * edge.dashed}" d="{way}"/><path class="tip" d="{tip}"/>'


def node_svg(node: Node) -> str:
    left, top, parts = node.x - node.width / 2, node.y - node.height / 2, []
    if node.kind == "dot":
        return f'<circle class="dot" cx="{node.x:.1f}" cy="{node.y:.1f}" r="6"/>'
    if node.kind == "pass":
        return lines_svg(node.lines, node.x, node.y, "label", "middle")
    size = f'width="{node.width:.1f}" height="{node.height:.1f}"'
    parts.append(f'<rect class="box" x="{left:.1f}" y="{top:.1f}" {size} rx="6"/>')
    parts.append(lines_svg(node.lines, node.x, node.y, "name", "middle"))
    if node.loop:
        edge = node.x + node.width / 2
        parts.append(f'<path class="wire" d="M{edge:.1f} {node.y - 8:.1f}h20v16H{edge + 6:.1f}"/>')
        parts.append(f'<path class="tip" d="M{edge + 1:.1f} {node.y + 8:.1f}l8 -4v8z"/>')
        parts.append(lines_svg(node.loop, edge + 26, node.y, "label", "start"))
    return "".join(parts)


def lines_svg(lines: list[str], x: float, y: float, kind: str, anchor: str) -> str:
    first = y - LINE * (len(lines) - 1) / 2 + 5
    return "".join(
        f'<text class="{kind}" x="{x:.1f}" y="{first + LINE * at:.1f}" text-anchor="{anchor}">'
        f"{html.escape(line)}</text>"
        for at, line in enumerate(lines)
    )
