"""Lines of a batch job."""

import json

from nanovllm.serving.openai.answer import COMPLETIONS

FOX = "the quick brown fox jumps over the lazy dog"
USER = [{"role": "user", "content": "two gulls circled"}]


def line(custom_id: str = "a", url: str = COMPLETIONS, **body) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()
