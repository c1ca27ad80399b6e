"""The pictures of chapter 2: the two planes, and the six lines of a step, as they stand in the engine."""

import ast

from chapters.site.sources import node_of
from chapters.svg import arrow, box, svg, words

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


def planes() -> str:
    """The control plane and the data plane, the loop above them, and what the loop carries between them."""
    parts = [box(90, 0, 140, 26, "LLM"), words(144, 41, "prompts", "name", "end"), words(176, 41, "text", "name")]
    parts += [arrow(150, 26, 150, 48), arrow(170, 48, 170, 26)]
    parts += [box(8, 48, 304, 36, "LLMEngine.step()\nthe loop, with the Detokenizer", "strong")]
    parts += [arrow(22, 84, 22, 128), arrow(96, 128, 96, 84), arrow(224, 84, 224, 128), arrow(298, 128, 298, 84)]
    parts += [words(160, 103, "SchedulerOutput", "name", "middle")]
    parts += [words(30, 118, "token ids", "name"), words(290, 118, "token ids", "name", "end")]
    parts += ['<path class="wire dashed" d="M160,112V252"/>']
    for left, kind, name, boxes, texts in (
        (
            0,
            "one",
            "control plane: decides",
            ("Scheduler", "BlockManager"),
            ("which tokens are next", "whose block is whose"),
        ),
        (
            170,
            "two",
            "data plane: computes",
            ("ModelRunner", "weights, KV cache"),
            ("one pass, one batch", "tensors, gigabytes"),
        ),
    ):
        for number in range(2):
            parts.append(box(left + 8, 128 + 50 * number, 134, 26, boxes[number], kind))
            parts.append(words(left + 75, 167 + 50 * number, texts[number], "tick", "middle"))
        parts.append(words(left + 75, 246, name, f"strong {kind}", "middle"))
    text = (
        "The LLM hands prompts to the loop, LLMEngine.step(), and gets text. Below the loop, on the left, the control "
        "plane: Scheduler and BlockManager. On the right the data plane: ModelRunner, weights and KV cache. The loop "
        "carries a SchedulerOutput from left to right and token ids from right to left."
    )
    return svg("The two planes of the engine", text, parts, 254)
