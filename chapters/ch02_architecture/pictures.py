"""The picture of chapter 2: the six lines of a step, as they stand in the engine."""

import ast

from chapters.site.sources import node_of
from chapters.svg import box, svg, words

WHO = {  # method -> who does its work, what it does
    "poll": ("cache tiers", "take in blocks that arrived"),
    "propose_drafts": ("speculation", "draft tokens to check"),
    "schedule": ("core/scheduler.py", "choose tokens, take blocks"),
    "run": ("worker/model_runner.py", "compute, sample"),
    "update": ("core/scheduler.py", "sequences grow or end"),
    "make_outputs": ("request.py", "text for the caller"),
}
ROW = 47


def lines_of_a_step() -> list[ast.stmt]:
    step = node_of("nanovllm/engine.py", "LLMEngine.step")
    assert isinstance(step, ast.FunctionDef)
    calls = [line for line in step.body if any(isinstance(node, ast.Call) for node in ast.walk(line))]
    return [line for line in calls if "perf_counter" not in ast.unparse(line)]


def step() -> str:
    """Each line of LLMEngine.step with who does it; an arrow goes from a line to those that use what it has made."""
    parts, said, made = list[str](), list[str](), dict[str, int]()
    uses: list[tuple[int, int, str]] = []
    for number, line in enumerate(lines_of_a_step()):
        call = next(node for node in ast.walk(line) if isinstance(node, ast.Call))
        assert isinstance(call.func, ast.Attribute)
        who, what = WHO[call.func.attr]
        top = 18 + ROW * number
        kind = "two" if call.func.attr == "run" else "one" if who.startswith("core") else ""
        parts.append(box(44, top, 172, 32, "", kind))
        name = f"self.{call.func.attr}" if ast.unparse(call.func.value) == "self" else call.func.attr
        parts.append(words(52, top + 14, f"{number + 1}  {name.removeprefix('self.')}()", "in strong"))
        parts.append(words(52, top + 27, what, "in"))
        parts.append(words(224, top + 20, who.rpartition("/")[2], "name"))
        said.append(f"{number + 1}. {call.func.attr}: {what} ({who})")
        uses += [
            (made[node.id], number, node.id) for node in call.args if isinstance(node, ast.Name) and node.id in made
        ]
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            made[line.targets[0].id] = number
    for start, end, what in uses:
        y1, y2 = 18 + ROW * start + 32, 18 + ROW * end
        if end == start + 1:
            x = 76
            parts.append(f'<path class="wire" d="M{x},{y1}V{y2}"/><path class="tip" d="M{x},{y2}l-3.5,-5h7z"/>')
            parts.append(words(x + 7, (y1 + y2) / 2 + 4, what, "tick"))
        else:
            x = 30 - 14 * (end - start - 2)
            d = f"M44,{y1 - 10 + 0 * x}H{x}V{y2 + 12 + 8 * (end - start - 2)}H44"
            parts.append(f'<path class="wire dashed" d="{d}"/>')
            parts.append(f'<path class="tip" d="M44,{y2 + 12 + 8 * (end - start - 2)}l-5,-3.5v7z"/>')
    parts.append(words(44, 10, "LLMEngine.step()", "name"))
    return svg("A step of the engine in six lines", "; ".join(said) + ".", parts, 18 + ROW * len(said) - 6)
