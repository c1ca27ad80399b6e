"""A prompt with a picture, block by block: placeholders, and the keys that tell two pictures apart.

    python examples/image_blocks.py

vLLM's documentation of prefix caching has this example: ten tokens, one of which stands for an image, become eight
tokens, 41 placeholders and a last token. Here a tiny model of Qwen3-VL's architecture, with random weights, computes
them; its answers mean nothing. Then the same picture comes again, and one that differs in one pixel.
"""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measuring import arguments, console, needs
from rich.table import Table
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from PIL import Image

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.core.block_hash import extra_keys
from nanovllm.core.sequence import Sequence

BLOCK_SIZE = 16
WORDS = {"<s>": 1, "[INST]": 3, "[/INST]": 4, "[IMG]": 10, " in": 1294, " this": 1593, "'s": 1681}
WORDS |= {" image": 3937, "What": 7493, "?\n": 9551}
SPECIAL = ["<s>", "[INST]", "[/INST]", "[IMG]"]
TEMPLATE = (
    "<s>{% for message in messages %}[INST]{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '\n' }}[IMG]{% else %}{{ part['text'] }}{% endif %}{% endfor %}[/INST]"
    "{% endfor %}"
)
PATCHES = 41  # side by side, so that the picture becomes 41 placeholders
PATCH = 16  # pixels of a placeholder's side


def make_checkpoint(folder: Path) -> Path:
    """A model that sees images, with the example's tokenizer and random weights."""
    names = {token_id: word for word, token_id in WORDS.items()}
    vocabulary = {names.get(i, f"word {i}"): i for i in range(9600)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="word 0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"'s| ?\p{L}+|[^\s\p{L}]+\n*"), behavior="isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=SPECIAL, eos_token="word 2", chat_template=TEMPLATE
    ).save_pretrained(folder)
    rope = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[4, 2, 2], mrope_interleaved=True)
    text: dict[str, Any] = dict(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=3, head_dim=16
    )
    text |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rope_parameters=rope)
    vision: dict[str, Any] = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=PATCH // 2)
    vision |= dict(num_position_embeddings=256, out_hidden_size=64, deepstack_visual_indexes=[0])
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=WORDS["[IMG]"])
    torch.manual_seed(0)
    disable_progress_bar()
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    processor: dict[str, Any] = dict(patch_size=PATCH // 2, merge_size=2, temporal_patch_size=2)
    processor |= dict(size={"shortest_edge": PATCH**2, "longest_edge": PATCHES * PATCH**2})
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    return folder


def draw() -> "Image.Image":
    """A row of coloured squares."""
    with needs('-e ".[images]"'):
        from PIL import Image, ImageDraw

    image = Image.new("RGB", (PATCHES * PATCH, PATCH), "white")
    pen = ImageDraw.Draw(image)
    for i in range(PATCHES):
        pen.rectangle((i * PATCH + 2, 2, i * PATCH + 13, 13), fill=f"hsl({i * 360 // PATCHES}, 80%, 50%)")
    return image


def blocks_of(seq: Sequence, hashes: list[bytes]) -> list[tuple[int, str, str, str]]:
    """(number, token ids, extra keys, hash) of each block; only full ones have a hash."""
    rows = []
    prompt = seq.tokens[: seq.num_prompt_tokens]
    for index in range(-(-len(prompt) // BLOCK_SIZE)):
        tokens = prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        keys = extra_keys(index, BLOCK_SIZE, seq.cache_salt, seq.lora_id, seq.mm_spans)
        said = "; ".join(f"{kind} {content[:8]}, starts at {start}" for kind, content, start in keys)
        rows.append((index, shown(tokens), said, hashes[index].hex() if index < len(hashes) else "not full: none"))
    return rows


def shown(tokens: list[int]) -> str:
    """Token ids; a run of placeholders is counted."""
    parts: list[str] = []
    run = 0
    for token_id in [*tokens, -1]:
        if token_id == WORDS["[IMG]"]:
            run += 1
            continue
        if run:
            parts.append(f"{run} x <P>")
            run = 0
        parts.append(str(token_id))
    return ", ".join(parts[:-1])


def main() -> None:
    arguments(__doc__, model=None).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder))
        llm = LLM(str(checkpoint), block_size=BLOCK_SIZE, max_model_len=256, num_gpu_blocks_override=32)
        picture = draw()

        def ask(image: "Image.Image") -> RequestOutput:
            part = {"type": "image_pil", "image_pil": image}
            question = {"role": "user", "content": [{"type": "text", "text": "What's in this image?"}, part]}
            return llm.chat([question], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)[0]

        text = "<s>[INST]What's in this image?\n[IMG][/INST]"
        token_ids = llm.get_tokenizer()(text, add_special_tokens=False).input_ids
        console().print(f"The prompt has {len(token_ids)} tokens, of which 10 is the image: {token_ids}")
        seqs: list[Sequence] = []
        llm.engine.on_step = lambda output, requests: seqs.extend(chunk.seq for chunk in output.chunks)
        first = ask(picture)
        console().print(f"With placeholders it has {len(first.prompt_token_ids)}: {shown(first.prompt_token_ids)}\n")
        table = Table("block", "token ids", "extra keys", "hash")
        for row in blocks_of(seqs[0], seqs[0].block_hashes):
            table.add_row(*map(str, row))
        console().print(table)

        results = Table("the same question about", "cached tokens", "the tower's runs so far")

        def add(name: str, output: RequestOutput) -> None:
            results.add_row(name, str(output.num_cached_tokens), str(llm.stats()["images"]["tower_runs"]))

        add("the picture", first)
        add("the same picture", ask(picture.copy()))
        changed = picture.copy()
        changed.putpixel((0, 0), (0, 0, 0))
        add("one with another pixel", ask(changed))
        console().print(results)


if __name__ == "__main__":
    main()
