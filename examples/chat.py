"""A terminal chat that streams, and shows after each answer how much of the conversation was found in the cache.

python examples/chat.py [MODEL]        /reset starts over, /quit or Ctrl-D leaves, Ctrl-C cuts an answer short
"""

import sys

from rich.console import Console

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import demo_model_path


def main() -> None:
    console = Console(highlight=False)
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path()))
    params = SamplingParams(temperature=0, max_tokens=256)  # a very small model rambles when it is sampled
    messages: list[dict[str, str]] = []
    console.print("Say something. [dim]/reset starts over, /quit leaves[/]")
    while True:
        try:
            question = console.input("\n[bold green]you[/] > ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print("\nbye")
            return
        if question == "/quit":
            return
        if question == "/reset":
            messages = []
        elif question:
            messages.append({"role": "user", "content": question})
            answer(llm, params, messages, console)


def answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]], console: Console) -> None:
    """Stream the reply and add it to the conversation; take the question back if there is no room for it."""
    text, output = "", None
    try:
        for output in llm.stream(llm.chat_prompt(messages), params):
            print(output.outputs[0].text[len(text) :], end="", flush=True)
            text = output.outputs[0].text
    except KeyboardInterrupt:
        console.print(" [dim](cut short)[/]", end="")
    except ValueError as error:
        messages.pop()
        console.print(f"[red]{error}[/]\n[dim]/reset starts a new conversation[/]")
        return
    messages.append({"role": "assistant", "content": text})
    if output is not None:
        num_prompt, metrics = len(output.prompt_token_ids), output.metrics
        rate = f", {1 / metrics.tpot_s:.0f} tokens/s" if metrics.tpot_s else ""
        console.print(
            f"\n[dim]{num_prompt} prompt tokens, {output.num_cached_tokens} of them cached; "
            f"first token after {(metrics.ttft_s or 0) * 1e3:.0f} ms{rate}[/]"
        )


if __name__ == "__main__":
    main()
