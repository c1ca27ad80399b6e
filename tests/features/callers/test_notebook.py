"""A notebook, run by a kernel as JupyterLab and VS Code run it: examples/notebook.ipynb, and what may go wrong."""

import asyncio
from pathlib import Path

import pytest

HINT = 'needs nbclient and ipykernel: pip install -e ".[ci]"'
pytest.importorskip("ipykernel", reason=HINT)
nbclient, nbformat = (pytest.importorskip(name, reason=HINT) for name in ("nbclient", "nbformat"))
new_code_cell = nbformat.v4.new_code_cell

ROOT = Path(__file__).parent.parent.parent.parent


class Kernel(nbclient.NotebookClient):
    """Runs cells one by one. What a cell put out: its bars, its texts, and the name of its error."""

    async def run(self, cell, interrupt: bool = False) -> tuple[list[str], str, str]:
        """interrupt: once, when the cell has put out something."""
        if cell not in self.nb.cells:
            self.nb.cells.append(cell)
        running = asyncio.ensure_future(self.async_execute_cell(cell, self.nb.cells.index(cell)))
        while interrupt and not running.done() and not cell.outputs:
            await asyncio.wait({running}, timeout=0.05)
        if interrupt:
            await self.km.interrupt_kernel()
        await running
        outputs = cell.outputs
        bars = [o.data["text/html"] for o in outputs if o.output_type == "display_data"]
        texts = [o.text for o in outputs if o.output_type == "stream"]
        texts += [o.data["text/plain"] for o in outputs if o.output_type == "execute_result"]
        return bars, "".join(texts), "".join(o.ename for o in outputs if o.output_type == "error")

    async def say(self, code: str) -> str:
        """What a new cell says; it draws no bar and fails at nothing."""
        bars, text, error = await self.run(new_code_cell(code))
        assert (bars, error) == ([], ""), text
        return text


def test_notebook(checkpoint, monkeypatch):
    """The example's cells in their turn; then what may go wrong. One kernel: its start takes most of the time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model, notebook = str(checkpoint()), nbformat.read(ROOT / "examples" / "notebook.ipynb", 4)

    async def run() -> None:
        client = Kernel(notebook, allow_errors=True, timeout=120, resources={"metadata": {"path": str(ROOT)}})
        async with client.async_setup_kernel():
            await run_example(client, model)
            await run_neighbours(client, model)

    asyncio.run(run())


async def run_example(client: Kernel, model: str) -> None:
    """A cell is interrupted, and leaves a working engine. Each engine's memory is given back."""
    cells = [cell for cell in client.nb.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells), "it is kept without outputs"
    parameters, build, batch, stories, again, stream, forget, growing, gathered, end = cells
    assert parameters.metadata["tags"] == ["parameters"] and stories.metadata["tags"] == ["raises-exception"]
    parameters.source = f"model, num_stories = {model!r}, 500"
    assert await client.run(parameters) == ([], "", "")
    assert await client.run(build) == ([], "", ""), "nothing is said about widgets, nothing logged"

    [bar], text, error = await client.run(batch)
    assert ">3/3</span> prefill " in bar and " prefix hits 0%" in bar and error == ""
    first = text.partition("The capital of France is -> ")[2].partition("\nA prime number is ->")[0]
    assert len(first) > 5
    [bar], _, error = await client.run(stories, interrupt=True)
    assert "/500</span>" in bar and "500/500" not in bar and error == "KeyboardInterrupt"
    assert await client.run(again) == ([], "True\n(0, 0)", "")
    assert await client.run(stream) == ([], first, "")
    await client.say("import weakref\nengine = weakref.ref(llm.engine)")
    assert await client.run(forget) == ([], "", "")
    assert await client.say("engine() is None") == "True", "an interrupt's traceback holds nothing"

    bars, text, error = await client.run(growing)
    assert (bars, error) == ([], "") and text.endswith(repr(first) + "\n")
    bars, text, error = await client.run(gathered)
    assert (bars, error) == ([], "") and repr(first) in text
    await client.say("engine = weakref.ref(async_llm.engine)")
    assert await client.run(end) == ([], "", "")
    assert await client.say("gc.collect()\nengine() is None") == "True"


async def run_neighbours(client: Kernel, model: str) -> None:
    """An interrupt reaches generate() in a cell that awaits something, too; `!` and what is left behind do no harm."""
    await client.say(f"llm = LLM({model!r}, max_model_len=256)\nlong = SamplingParams(max_tokens=200, ignore_eos=True)")
    waits = "await asyncio.sleep(0)\nllm.generate(['the quick'] * 500, long)"
    [bar], _, error = await client.run(new_code_cell(waits), interrupt=True)
    assert error == "KeyboardInterrupt" and "500/500" not in bar
    again = "len(llm.generate('the quick', long, use_tqdm=False)[0].outputs[0].token_ids)"
    assert await client.say(again) == "200"
    assert (await client.say("!echo a child")).split() == ["a", "child"], "no warning of a process that was forked"

    await client.say(f"async_llm = AsyncLLM({model!r}, max_model_len=256)")
    forever = (
        "print('begun')\nwhile True:\n    async for output in async_llm.generate('the quick', long):\n        pass"
    )
    _, _, error = await client.run(new_code_cell(forever), interrupt=True)
    assert error == "CancelledError", "so IPython ends a cell that awaits"
    assert await client.say("(await async_llm.stats())['num_running']") == "0"
    again = "async for output in async_llm.generate('the quick', long): pass\nlen(output.outputs[0].token_ids)"
    assert await client.say(again) == "200"
    assert (await client.run(new_code_cell("1 / 0")))[2] == "ZeroDivisionError"  # its traceback holds no engine
    left = "import time\nengine = weakref.ref(async_llm.engine)\ndel async_llm\n"
    wait = "for _ in range(100):\n    gc.collect(); time.sleep(0.05)\n    if engine() is None: break\nengine() is None"
    assert await client.say(left + wait) == "True", "the thread of an AsyncLLM that nobody has any more ends by itself"
