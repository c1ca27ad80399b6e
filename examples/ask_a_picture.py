"""Several questions about one picture: the first one pays for the picture, the others for their own words.

    python examples/ask_a_picture.py [MODEL] [--picture FILE]

Without a model, the demo model gets a tower of random weights: it computes all that a real one computes, and answers
without having seen anything. A model that sees images answers about the picture, for example
HuggingFaceTB/SmolVLM-256M-Instruct or Qwen/Qwen3.5-0.8B.
"""

import argparse
import json
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measuring import arguments, existing_file, needs
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.smolvlm import SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import demo_model_path, model_or_demo

if TYPE_CHECKING:
    from PIL import Image

QUESTIONS = ("What is in this picture?", "What colour is the boat?", "How many gulls are there?", "Is it day or night?")
GRID = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# SigLIP's form, smaller: tiles of 256 pixels, 64 placeholders each.
VISION = dict(image_size=256, patch_size=16, hidden_size=192, intermediate_size=768, num_hidden_layers=4)
PROCESSOR = dict(size={"longest_edge": 512}, max_image_size={"longest_edge": 256}, do_image_splitting=True)


def draw() -> "Image.Image":
    """A red boat on the sea, a sun, two gulls."""
    with needs('-e ".[images]"'):
        from PIL import Image, ImageDraw

    image = Image.new("RGB", (640, 420), "#bfe3f7")
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 280, 640, 420), fill="#2b6f9e")
    pen.ellipse((500, 40, 580, 120), fill="#ffd23e")
    pen.polygon([(180, 280), (460, 280), (410, 340), (230, 340)], fill="#c8342b")
    pen.line((310, 280, 310, 110), fill="#5a3c22", width=8)
    pen.polygon([(322, 120), (322, 260), (430, 260)], fill="white")
    for x, y in ((120, 90), (200, 60)):
        pen.arc((x, y, x + 40, y + 30), 190, 330, fill="black", width=3)
        pen.arc((x + 34, y, x + 74, y + 30), 210, 350, fill="black", width=3)
    return image


def opened(text: str) -> "Image.Image":
    """The type of an argument that is a picture's file."""
    with needs('-e ".[images]"'):
        from PIL import Image

    path = existing_file(text)
    try:
        picture = Image.open(path)
        picture.load()
        return picture
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be opened as a picture: {error}") from None


def make_checkpoint(folder: Path) -> Path:
    """SmolVLM's architecture: the demo model's weights, and a tower of random ones."""
    disable_progress_bar()
    demo = demo_model_path()
    language = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<image>", "<fake_token_around_image>", "<global-img>", *GRID]}
    )
    tokenizer.chat_template = TEMPLATE
    language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    image_token_id: Any = tokenizer.convert_tokens_to_ids("<image>")
    config = SmolVLMConfig(
        text_config=language.config.to_dict() | {"vocab_size": len(tokenizer)},
        vision_config=VISION,
        scale_factor=2,
        image_token_id=image_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = SmolVLMForConditionalGeneration(config).bfloat16()
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), "utf-8")
    if (demo / "generation_config.json").is_file():
        shutil.copy(demo / "generation_config.json", folder)
    return folder


def main() -> None:
    parser = arguments(__doc__, model="a checkpoint that sees images, as a directory or hub id")
    parser.add_argument("--picture", type=opened, help="a file; without one the script draws a boat")
    args = parser.parse_args()
    console = Console()
    with ExitStack() as stack:
        if args.model is None:
            console.print(
                "The tower of this model has random weights, so it has not learned to see: its answers are guesses."
            )
            args.model = str(make_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        llm = LLM(model_or_demo(args.model), max_model_len=4096, max_num_seqs=4)
        image = {"type": "image_pil", "image_pil": args.picture or draw()}
        table = Table("question", "prompt tokens", "cached", "first token after", "answer")
        for text in QUESTIONS:
            question = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
            [output] = llm.chat(question, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
            first_ms = f"{(output.metrics.ttft_s or 0) * 1e3:,.0f} ms"
            num_tokens = str(len(output.prompt_token_ids))
            answer = escape(output.outputs[0].text.strip())
            table.add_row(text, num_tokens, str(output.num_cached_tokens), first_ms, answer)
        console.print(table)
        console.print(f"The tower has run {llm.stats()['images']['tower_runs']} time.")


if __name__ == "__main__":
    main()
