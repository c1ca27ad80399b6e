"""`nanovllm chat` and `nanovllm generate`: text on the screen as it is generated, and what the cache did for it."""

from typing import Any

from rich.text import Text

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.prompts import Prompt
from nanovllm.tools.screen import Screen
from nanovllm.tools.terminal import Questions, WordWrap

HELP = Text("/reset starts over, /quit or Ctrl-D leaves, Ctrl-C cuts an answer short", "dim")
YOU = Text.assemble(("you", "bold green"), " > ")


def run_generate(llm: LLM, params: SamplingParams, prompt: str) -> int:
    """Returns the exit code: 0, 1 if the answer ends with an error, 130 if it was cut short."""
    output = _stream(llm, prompt, params)
    if output is None or not output.finished:
        return 130
    return 1 if output.outputs[0].finish_reason == "error" else 0


def run_chat(llm: LLM, params: SamplingParams, system: str | None, images: list[str]) -> int:
    """images: files that the first question is about."""
    console = Screen()
    console.print("Say something.", HELP)
    beginning: list[Any] = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    with Questions(console, YOU) as you:
        while True:
            console.print()
            try:
                question = you.ask().strip()
            except (EOFError, KeyboardInterrupt):
                console.print("\nbye")
                return 0
            if question == "/quit":
                return 0
            if question == "/reset":
                messages = list(beginning)
            elif question.startswith("/"):
                console.print(HELP)
            elif question:
                content: Any = question
                if images and len(messages) == len(beginning):
                    shown = [{"type": "image_url", "image_url": {"url": path}} for path in images]
                    content = [*shown, {"type": "text", "text": question}]
                messages.append({"role": "user", "content": content})
                try:
                    output = _stream(llm, llm.chat_prompt(messages), params)
                except ValueError as error:  # there is no room for it, most likely
                    messages.pop()
                    console.print(f"{error}", style="red")
                    console.print("/reset starts a new conversation", style="dim")
                    continue
                messages.append({"role": "assistant", "content": output.outputs[0].text if output else ""})


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput | None:
    """Print the text as it grows. Returns the last output, None if there was none before Ctrl-C."""
    shown = WordWrap()
    output = None
    num_shown = 0
    end = "\n"
    try:
        for output in llm.stream(prompt, params):
            text = output.outputs[0].text
            shown.write(text[num_shown:])
            num_shown = len(text)
    except KeyboardInterrupt:
        end = " (cut short)\n"
    shown.write(end)
    if output is not None:
        num_prompt = len(output.prompt_token_ids)
        metrics = output.metrics
        rate = f", then {1 / metrics.tpot_s:.0f} tokens/s" if metrics.tpot_s else ""
        share, per_step = metrics.acceptance_rate, metrics.tokens_per_step
        drafts = f"; {share:.0%} of draft tokens accepted, {per_step:.1f} tokens a step" if share is not None else ""
        Screen(stderr=True).print(
            f"{num_prompt} prompt tokens, {output.num_cached_tokens} of them cached; "
            f"first token after {(metrics.ttft_s or 0) * 1e3:.0f} ms{rate}{drafts}",
            style="dim",
        )
    return output
