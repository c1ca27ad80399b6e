"""The batch job of `nanovllm run-batch` as a Ray Data pipeline: read, one engine per actor, write.

    pip install -e ".[ray]"
    python examples/ray_data_batch.py -i in.jsonl -o answers                 on this machine, two actors
    RAY_ADDRESS=auto python examples/ray_data_batch.py --num-engines 16 -i /shared/in.jsonl -o /shared/answers

Input and output lines are those of `nanovllm run-batch`; the output is a folder of files. Requests are sorted by their
prompts first, so that those which begin alike reach the same engine one after another, and its prefix cache pays.
On a cluster the input and the checkpoint must be on storage that every node sees. A failed job runs again in full.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import arguments, existing_file, needs, positive

from nanovllm import LLM
from nanovllm.jobs.answer_lines import CustomIds, answer_lines, read_custom_id
from nanovllm.serving.openai.json_lines import parse_json, read_lines, to_json
from nanovllm.tools.demo_model import model_or_demo

parser = arguments(__doc__, model=None)
parser.add_argument("-i", "--input-file", type=existing_file, required=True)
parser.add_argument("-o", "--output-folder", type=Path, required=True, help="must not exist")
parser.add_argument("--model", help="directory or hub id (default: the demo checkpoint)")
parser.add_argument("--num-engines", type=positive, default=2)
parser.add_argument(
    "--kv-cache-memory-bytes", type=positive, default=1 << 30, help="KV cache of each engine (default: 1 GiB)"
)
parser.add_argument("--max-model-len", type=positive)
if __name__ == "__main__":  # --help needs no Ray
    args = parser.parse_args()

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports that it is used
with needs('-e ".[ray]"'):
    import ray
    from ray.data.datasource import BlockBasedFileDatasink, SaveMode

LINES_PER_READ = 10_000
LINES_PER_BLOCK = 2_048  # what an engine gets at a time


def spans(path: Path) -> list[dict[str, Any]]:
    """Where each reader begins. Duplicate ids are found here, the only place that sees all lines."""
    found: list[dict[str, Any]] = []
    ids, offset = CustomIds(), 0
    with path.open("rb") as file:
        for number, raw in enumerate(file):
            if number % LINES_PER_READ == 0:
                found.append({"path": str(path), "offset": offset, "number": number, "repeated": {}})
            try:
                ids.claim(read_custom_id(parse_json(raw)), number + 1)
            except ValueError as error:
                found[-1]["repeated"][number + 1] = str(error)
            offset += len(raw)
    return [{"span": json.dumps(span)} for span in found]


def read_span(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    span = json.loads(row["span"])
    for number, raw in read_lines(Path(span["path"]), span["offset"], span["number"]):
        if number > span["number"] + LINES_PER_READ:
            return
        yield {"number": number, "raw": raw, "repeated": span["repeated"].get(str(number), ""), "key": sort_key(raw)}


def sort_key(raw: bytes) -> str:
    """Equal beginnings for requests that can share a prefix: they have the same salt and begin with the same text."""
    try:
        body = parse_json(raw)["body"]
        return json.dumps([body.get("cache_salt"), body.get("messages", body.get("prompt"))])
    except (ValueError, LookupError, AttributeError):
        return ""  # it will be answered by an error


class Engine:
    """One actor: the model is loaded once, every batch of lines is answered with what the cache still holds."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.llm, self.names = LLM(model, **options), (Path(model).name, model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        repeated = dict(zip(batch["number"].tolist(), batch["repeated"], strict=True))

        def claim_id(custom_id: str, number: int) -> None:
            if repeated[number]:
                raise ValueError(repeated[number])

        lines = zip(batch["number"].tolist(), batch["raw"], strict=True)
        steps = answer_lines(self.llm, lines, self.names, claim_id=claim_id)
        answers = [answer for step in steps for answer in step]
        return {"record": [to_json(answer.record(f"batch_req_{answer.line_number}")) for answer in answers]}


class JSONLines(BlockBasedFileDatasink):
    def write_block_to_file(self, block: Any, file: Any) -> None:
        file.write("".join(f"{row['record']}\n" for row in block.iter_rows(public_row_format=True)).encode())


def main() -> None:
    source, target = args.input_file.absolute(), args.output_folder.absolute()
    if not source.is_file() or target.exists():
        parser.error(f"{source} must be a file, and {target} must not exist")

    if not (parts := spans(source)):
        parser.error(f"{source} has no lines")
    ray.init()
    rows = ray.data.from_items(parts).flat_map(read_span).sort("key").materialize()
    # Neighbours stay together in a block, and a block goes to one engine.
    num_blocks = max(args.num_engines, math.ceil(rows.count() / LINES_PER_BLOCK))
    # What the engines leave of the CPUs reads and writes. A GPU for each, if there are GPUs.
    resources = ray.cluster_resources()
    share = max(resources["CPU"] - 1, 0.5) / args.num_engines
    options = {"kv_cache_memory_bytes": args.kv_cache_memory_bytes, "max_model_len": args.max_model_len}
    answers = rows.repartition(num_blocks).map_batches(
        Engine,
        fn_constructor_args=[model_or_demo(args.model), options],
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=args.num_engines),
        num_cpus=math.floor(share) or share,
        num_gpus=1 if "GPU" in resources else None,
    )
    answers.write_datasink(JSONLines(str(target), file_format="jsonl", mode=SaveMode.ERROR))
    print(f"{rows.count():,} lines answered in {target}")


if __name__ == "__main__":
    main()
