"""A streaming chat in a few lines; each answer says how much of the conversation was found in the cache.

python examples/chat.py [MODEL]        Ctrl-D leaves (`nanovllm chat` is the same with more conveniences)
"""

import sys

from measuring import arguments

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

args = arguments(__doc__).parse_args()
llm = LLM(model_or_demo(args.model))
messages = []
print("you > ", end="", flush=True)
for question in sys.stdin:
    messages.append({"role": "user", "content": question.strip()})
    text = ""
    for output in llm.stream(llm.chat_prompt(messages), SamplingParams(temperature=0, max_tokens=256)):
        print(output.outputs[0].text[len(text) :], end="", flush=True)
        text = output.outputs[0].text
    messages.append({"role": "assistant", "content": text})
    print(
        f"\n({len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them cached)\n\nyou > ",
        end="",
        flush=True,
    )
