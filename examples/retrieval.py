"""Answers from this repository's own texts: embeddings find passages of the chapters, a chat model answers with them.

    python examples/retrieval.py                                    three questions, on the demo checkpoint
    python examples/retrieval.py "What does temperature do?"        your own question
    python examples/retrieval.py --embedder Qwen/Qwen3-Embedding-0.6B --reranker Qwen/Qwen3-Reranker-0.6B

Prints what embedding the passages cost, with the tokens that the prefix cache saved, and for each question the passages
that were found and the answer.

The demo model was trained to chat and not to embed. It does so all the same: asked for the topic of a text in one word,
what it is about to say is a summary (arXiv:2307.16645). All its vectors have a large part in common, so the mean of
the passages is subtracted from passages, and that of the questions from questions. A model that was trained to embed
needs neither, and finds more. The demo model is also very small for answering: judge the passages, not the answers.
"""

import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import arguments, positive
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

CHAPTERS = Path(__file__).parent.parent / "chapters"
QUESTIONS = ["What does temperature do?", "How does speculative decoding guess tokens?", "What is a block table?"]
ONE_WORD = (
    "Passages of a course about inference engines for language models, and questions about it. "
    'Each is summed up in one word. The topic of this text: "{text}" in one word: "'
)
TASK = "Instruct: Given a question about an inference engine, retrieve the passage that answers it\nQuery: "
RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
EMBEDDED_WORDS, LEAST_WORDS = 80, 25  # of a passage: what is embedded, and what is no passage


@dataclass(frozen=True)
class Passage:
    """The first paragraph of a section of a chapter."""

    chapter: str
    title: str
    text: str

    @property
    def beginning(self) -> str:
        return f"{self.title}. {' '.join(self.text.split()[:EMBEDDED_WORDS])}"


def read_passages() -> list[Passage]:
    passages = []
    for page in sorted(CHAPTERS.glob("ch*/README.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
            title, _, body = section.partition("\n")
            paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", body) if part.strip()[:1].isalpha()]
            long = [paragraph for paragraph in paragraphs if len(paragraph.split()) >= LEAST_WORDS]
            passages += [Passage(page.parent.name[:4], title, without_links(paragraph)) for paragraph in long[:1]]
    return passages


def without_links(text: str) -> str:
    return re.sub(r"(?<!`)\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")


class Retriever:
    """Passages as vectors. is_trained: the model was made for embeddings.

    outputs, seconds    of the passages, from the model
    """

    def __init__(self, llm: LLM, passages: list[Passage], is_trained: bool) -> None:
        self.llm, self.passages, self.is_trained = llm, passages, is_trained
        texts = [passage.beginning for passage in passages]
        started = time.perf_counter()
        self.outputs = llm.embed(texts if is_trained else [ONE_WORD.format(text=text) for text in texts])
        self.seconds = time.perf_counter() - started
        vectors = torch.tensor([output.outputs.embedding for output in self.outputs])  # [passages, hidden_size]
        self.mean, self.mean_of_questions = vectors.new_zeros(2, vectors.shape[1])
        if not is_trained:  # a question differs from a passage, whatever both are about
            questions = list({f"What about {passage.title}?": None for passage in passages})[:40]
            self.mean, self.mean_of_questions = vectors.mean(0), self.vectors_of(questions).mean(0)
        self.vectors = torch.nn.functional.normalize(vectors - self.mean, dim=1)

    def vectors_of(self, questions: list[str]) -> torch.Tensor:
        prompts = [TASK + text if self.is_trained else ONE_WORD.format(text=text) for text in questions]
        outputs = self.llm.embed(prompts, use_tqdm=False)
        return torch.tensor([output.outputs.embedding for output in outputs])

    def find(self, question: str, num: int) -> list[tuple[float, Passage]]:
        """The passages whose vectors have the smallest angle with the question's, and the cosine of that angle."""
        vector = torch.nn.functional.normalize(self.vectors_of([question])[0] - self.mean_of_questions, dim=0)
        best = (self.vectors @ vector).topk(min(num, len(self.passages)))
        return [(score, self.passages[i]) for score, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]


def main() -> None:
    parser = arguments(__doc__, model=None)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--embedder", help="a model that was trained for embeddings (default: the demo model)")
    parser.add_argument("--reranker", help="a Qwen3-Reranker, which reads the passages that were found once more")
    parser.add_argument("--model", help="the model that answers (default: the demo model)")
    parser.add_argument("--passages", type=positive, help="how many passages to embed (default: all)")
    parser.add_argument("--found", type=positive, default=3, help="how many passages the model is shown")
    args = parser.parse_args()
    logging.getLogger("nanovllm").setLevel(logging.ERROR)
    console, passages = Console(), read_passages()[: args.passages]

    started = time.perf_counter()
    embedder = LLM(model_or_demo(args.embedder), runner="pooling", max_model_len=1024)
    loaded = time.perf_counter()
    retriever = Retriever(embedder, passages, is_trained=args.embedder is not None)
    num_tokens = sum(len(output.prompt_token_ids) for output in retriever.outputs)
    num_cached = sum(output.num_cached_tokens for output in retriever.outputs)
    cost = f"{num_tokens:,} tokens, [green]{num_cached:,}[/] of them found in the cache, in {retriever.seconds:.1f} s"
    console.print(f"{len(passages)} passages are vectors of {retriever.vectors.shape[1]} numbers now: {cost}")
    console.print(f"(and the model was loaded in {loaded - started:.1f} s).")
    if args.embedder is None:
        console.print("[yellow]The demo model was not trained for embeddings; the file says how it is made to.[/]")
    reranker = None
    if args.reranker:
        original = RERANKER | {"is_original_qwen3_reranker": True}
        reranker = LLM(model_or_demo(args.reranker), runner="pooling", hf_overrides=original, max_model_len=2048)
    chat = LLM(model_or_demo(args.model), max_model_len=2048)

    for question in args.questions:
        found = retriever.find(question, args.found if reranker is None else 4 * args.found)
        if reranker is not None:
            scores = reranker.score(question, [passage.text for _, passage in found], use_tqdm=False)
            ranked = zip((output.outputs.score for output in scores), (passage for _, passage in found), strict=True)
            found = sorted(ranked, key=lambda pair: -pair[0])[: args.found]
        show(console, question, found, answer(chat, question, [passage for _, passage in found]))


def answer(chat: LLM, question: str, passages: list[Passage]) -> str:
    texts = "\n\n".join(f"{passage.title}: {passage.text}" for passage in passages[::-1])  # the best one last
    messages = [
        {"role": "system", "content": "You answer in one short sentence, with the words of the notes."},
        {"role": "user", "content": f"Notes:\n{texts}\n\nQuestion: {question}"},
    ]
    [output] = chat.chat(messages, SamplingParams(temperature=0, max_tokens=60, stop=["\n"]), use_tqdm=False)
    return output.outputs[0].text.strip()


def show(console: Console, question: str, found: list[tuple[float, Passage]], text: str) -> None:
    table = Table(title=escape(question), title_justify="left", title_style="bold", expand=True)
    table.add_column("score", justify="right")
    table.add_column("chapter")
    table.add_column("passage", ratio=1)
    for score, passage in found:
        table.add_row(
            f"{score:.2f}", passage.chapter, f"[bold]{escape(passage.title)}[/] {escape(passage.text[:160])}..."
        )
    console.print()
    console.print(table)
    console.print(Panel(escape(text), title="the model's answer", title_align="left", style="cyan"))


if __name__ == "__main__":
    main()
