"""Tiny random checkpoints of models that see images, pictures for them, and transformers' answers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.checkpoints import HYBRID, SIZES, make_tokenizer

GRID = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IDEFICS_TOKENS = ["<fake_token_around_image>", "<image>", "<global-img>", *GRID]
QWEN_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
IDEFICS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TEMPLATE = IDEFICS_TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
TEXT = dict(SIZES, vocab_size=400)
SIGLIP = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
)
QWEN_VISION = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    patch_size=8,
    num_position_embeddings=64,
    out_hidden_size=64,
)
IDEFICS_PROCESSOR = dict(
    do_convert_rgb=True,
    do_image_splitting=True,
    do_normalize=True,
    do_pad=True,
    do_rescale=True,
    do_resize=True,
    image_mean=[0.5, 0.5, 0.5],
    image_std=[0.5, 0.5, 0.5],
    max_image_size={"longest_edge": 32},
    resample=1,
    rescale_factor=1 / 255,
    size={"longest_edge": 64},
)
QWEN_PROCESSOR = dict(
    image_processor_type="Qwen2VLImageProcessorFast",
    size={"shortest_edge": 256, "longest_edge": 16384},
    patch_size=8,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.5, 0.5, 0.5],
    image_std=[0.5, 0.5, 0.5],
)
QWEN3_TEXT = dict(
    TEXT,
    head_dim=16,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
)
KINDS: dict[str, tuple[dict, dict, dict, str]] = {
    "idefics3": (dict(TEXT, model_type="llama", head_dim=16), SIGLIP, IDEFICS_PROCESSOR, IDEFICS_TEMPLATE),
    "smolvlm": (dict(TEXT, model_type="llama", head_dim=16), SIGLIP, IDEFICS_PROCESSOR, IDEFICS_TEMPLATE),
    "qwen3_vl": (QWEN3_TEXT, dict(QWEN_VISION, deepstack_visual_indexes=[0, 1]), QWEN_PROCESSOR, QWEN_TEMPLATE),
    "qwen3_5": (dict(TEXT, **HYBRID), QWEN_VISION, QWEN_PROCESSOR, QWEN_TEMPLATE),
}


def make_image_checkpoint(folder: Path, kind: str, vision: dict[str, Any] | None = None, **changes: Any) -> Path:
    """vision: of vision_config's fields. changes: of the processor's."""
    text, fields, processor, template = KINDS[kind]
    fields = fields | (vision or {})
    tokenizer = make_tokenizer()
    tokens = IDEFICS_TOKENS if kind in ("idefics3", "smolvlm") else QWEN_TOKENS
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in tokens}
    options: dict[str, Any] = dict(image_token_id=ids.get("<image>", ids.get("<|image_pad|>")))
    if kind in ("idefics3", "smolvlm"):
        options |= dict(scale_factor=2)
    else:
        options |= dict(vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"])
    options |= dict(text_config=dict(text), vision_config=fields, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **options)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name or "vision" in name or "connector" in name:
                parameter.normal_(0, 0.3)
            if name.endswith(("A_log", "dt_bias")):
                parameter.uniform_(0.1, 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | changes), "utf-8")
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random one, of few colours."""
    generator = torch.Generator().manual_seed(seed)
    tiny = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(tiny.numpy()).resize((width, height), Image.Resampling.BICUBIC)


@cache
def reference(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
