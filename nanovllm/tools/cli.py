"""The `nanovllm` command: what the shell says becomes arguments of the tools beside this file."""

import argparse
import logging
import signal
import sqlite3
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.checks.names import known_names, neutral_options
from nanovllm.checks.values import check_number, shorten
from nanovllm.config import EngineConfig
from nanovllm.files.demo_model import is_demo_model
from nanovllm.serving.http.options import GROUPS, ServeOptions
from nanovllm.tools.demo_model import demo_model_path
from nanovllm.tools.flags import (
    ENGINE_GROUPS,
    FlexibleArgumentParser,
    add_flags,
    add_grouped_flags,
    add_vllm_flags,
    flag_of,
)
from nanovllm.tools.screen import Screen, standard_streams

OVERVIEW = """\
An LLM inference engine for the shell, small enough to read in a weekend.

  nanovllm chat                                   talk to a small model (fetched the first time)
  nanovllm generate "The capital of France is"    let it continue a text
  nanovllm run-batch -i in.jsonl -o out.jsonl     answer a file of requests of any length
  nanovllm analyze requests.jsonl                 what prefix caching would gain on a log of requests
  nanovllm check-model PATH                       how the engine reads a checkpoint or a GGUF file, and what it warns of
  nanovllm cache DIRECTORY                        what a --prefix-cache-dir holds; --prune or --clear it
  nanovllm bench                                  how fast is this machine?
  nanovllm serve                                  OpenAI's API over HTTP, and a page that shows the engine at work

chat, generate, run-batch, analyze and bench take --model with a checkpoint directory, a GGUF file, a hub id such as
Qwen/Qwen3-0.6B or the demo model's name, demo; serve and check-model take it as their first argument. Every command
takes --help.
"""
RUN_BATCH = """\
Input and output are in OpenAI's batch format. A line of the input is
  {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 16}}
or has the url /v1/completions and a "prompt" in its body; with --runner pooling the urls are /v1/embeddings, /rerank,
/score and /pooling. A line that cannot be run gets an error record. The same command continues a job that was stopped
for any reason. Ctrl-C (or SIGTERM) finishes the requests that have started; a second one drops them.

vLLM's other flags are taken at the values that change nothing here, and refused at others (examples/move_to_vllm.md).

exit code: 0 all lines succeeded, 1 some are error records, 2 the job could not run, 128 + n stopped by signal n
"""
CHECK_MODEL = """\
Shows what is in a model's files: architecture, dtype, tokenizer, when a BOS is added, what ends an answer and which
file says so, what the chat template reads and shows; and every warning. Loads no weights.

exit code: 0 the engine can use it, 1 it cannot: an error says why, 2 there is no such model
"""
SERVE, BATCH = "nanovllm serve", "nanovllm run-batch"
OF_BATCH = ("input_file", "output_file", "served_model_name", "lora_modules")
SERVE_HELP = """\
OpenAI's API over HTTP: /v1/models, /v1/chat/completions, /v1/completions and /v1/responses; with --runner pooling
/v1/embeddings, /rerank, /score and /pooling instead of the last three; /tokenize and /detokenize; /health, and /metrics
for Prometheus and for vLLM's Grafana boards. The page at / is a chat, and shows the engine at work beside it.
vLLM's other flags are taken at the values that change nothing here, and refused at others (examples/move_to_vllm.md).

exit code: 0 ended by SIGTERM or Ctrl-C, 1 the engine has died, 2 the server could not start
"""
MODEL_HELP = (
    "checkpoint directory, GGUF file or hub id, owner/name:Q8_0 for one of its GGUF files; demo for the demo model, "
    "demo:Q4_1 for the GGUF file it comes from, unless a file has that name (default: the demo model)"
)
# Of SamplingParams, those that make sense for one answer on a screen.
SAMPLING_FLAGS = (
    "temperature top_p top_k min_p max_tokens repetition_penalty presence_penalty frequency_penalty".split()
)
# Of EngineConfig, what says which files are read.
CHECKED_FLAGS = "tokenizer revision load_format generation_config hf_overrides runner convert".split()
MAX_TOKENS = 512
MAX_BENCH = 65_536


# A person's mistake, or a machine's state. What else is raised is ours, and its traceback says where.
ERRORS = (ValueError, ArithmeticError, OSError, RuntimeError, MemoryError, ModuleNotFoundError, sqlite3.Error)


def main(argv: list[str] | None = None) -> int:
    with standard_streams():
        args = _parser().parse_args(argv)
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        try:
            _reject_empty(args)
            if "model" in args and args.model is None:
                if args.command == "serve":
                    _reject_swallowed(args)
                args.model = str(demo_model_path())  # not "demo": a folder of that name would win
            status = COMMANDS[args.command](args)
            sys.stdout.flush()
            return status
        except BrokenPipeError:  # nobody reads on: what a shell says of a program that SIGPIPE ended
            return 128 + getattr(signal, "SIGPIPE", 13)  # Windows has none
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except ERRORS as error:
            print(f"nanovllm {args.command}: {str(error) or type(error).__name__}", file=sys.stderr)
            return 2


def _analyze(args: argparse.Namespace) -> int:
    from nanovllm.tools.analyze import run_analyze

    return run_analyze(Path(args.log), args.model, args.block_size)


def _check_model(args: argparse.Namespace) -> int:
    from nanovllm.tools.check_model import run_check_model

    return run_check_model(_engine_config(args))


def _cache(args: argparse.Namespace) -> int:
    from nanovllm.tools.prefix_cache import run_cache

    return run_cache(args.directory, args.prune, args.clear)


def _run_batch(args: argparse.Namespace) -> int:
    from nanovllm.jobs.run_batch import run_batch

    _check_names(args, OF_BATCH, BATCH)
    names, adapters = tuple(args.served_model_name), tuple(args.lora_modules)
    return run_batch(Path(args.input_file), Path(args.output_file), _engine_config(args), names, adapters)


def _generate(args: argparse.Namespace) -> int:
    from nanovllm.tools.chat import run_generate

    if args.prompt is None and sys.stdin.isatty():
        raise ValueError('name a prompt:  nanovllm generate "The capital of France is"  (or pipe one in)')
    prompt = sys.stdin.read().removesuffix("\n") if args.prompt is None else args.prompt
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to continue")
    return run_generate(*_load_and_sample(args), prompt)


def _chat(args: argparse.Namespace) -> int:
    from nanovllm.tools.chat import run_chat

    return run_chat(*_load_and_sample(args), args.system, args.image)


def _bench(args: argparse.Namespace) -> int:
    from nanovllm.tools.bench import run_bench

    for name in ("batch_sizes", "input_len", "output_len"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            check_number(flag_of(name), value, Integral, 1, MAX_BENCH)
    return run_bench(_load(args), args.batch_sizes, args.input_len, args.output_len)


def _serve(args: argparse.Namespace) -> int:
    try:
        from nanovllm.serving.http.serve import serve
    except ImportError as error:
        raise ValueError(f'the server needs packages of its own ({error}): pip install "nanovllm[serve]"') from error

    given = {f.name: getattr(args, f.name) for f in fields(ServeOptions) if hasattr(args, f.name)}
    _check_names(args, ServeOptions.__dataclass_fields__, SERVE)
    return serve(_engine_config(args), ServeOptions(**given))


COMMANDS = {
    "chat": _chat,
    "generate": _generate,
    "run-batch": _run_batch,
    "analyze": _analyze,
    "check-model": _check_model,
    "cache": _cache,
    "bench": _bench,
    "serve": _serve,
}


# -- helpers ----------------------------------------------------------------------------------------------------------


def _check_names(args: argparse.Namespace, own: Iterable[str], what: str) -> None:
    """own: options beside the engine's. Raises ValueError for one of vLLM's at a value that would change something."""
    given = {name: value for name, value in vars(args).items() if name != "command"}
    known_names(given, (*EngineConfig.__dataclass_fields__, *own), what)


def _reject_empty(args: argparse.Namespace) -> None:
    """An empty argument is an unset variable of a shell script, most likely. Of a few of vLLM's it is the default."""
    of_vllm = neutral_options(BATCH if args.command == "run-batch" else SERVE)
    may_be_empty = {"prompt", *(name for name, values in of_vllm.items() if "" in values)}
    for name, value in vars(args).items():
        if name not in may_be_empty and "" in (value if isinstance(value, list) else [value]):
            raise ValueError(f"{flag_of(name)} is empty; is a variable of the shell not set?")


def _reject_swallowed(args: argparse.Namespace) -> None:
    """A server's model may follow its flags. Raise ValueError if a flag that takes several values may have taken it."""
    for name, value in vars(args).items():
        if isinstance(value, list) and len(value) > 1:
            found = f"{flag_of(name)} has {len(value)} values, and no model is named"
            raise ValueError(f"{found}: write the model first, {shorten(value[-1])} if that is it, or else demo")


class _OneModel(argparse.Action):
    """A server has one, whichever way it is named."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest, None) not in (None, values):
            parser.error(f"two models are named, {getattr(namespace, self.dest)} and {values}; a server has one")
        setattr(namespace, self.dest, values)


def _load(args: argparse.Namespace) -> LLM:
    config = _engine_config(args)
    with Screen(stderr=True).working(f"loading {config.model}"):
        return LLM(**vars(config))


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    names = [*EngineConfig.__dataclass_fields__, "kv_offloading_size"]
    return EngineConfig(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _load_and_sample(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    """What was given on top of MAX_TOKENS and the checkpoint's other defaults; greedy where it has none and for the
    demo model, for small models ramble."""
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if hasattr(args, name)}
    SamplingParams(**given)  # complains before the model is loaded
    llm = _load(args)
    is_greedy = "temperature" not in llm.engine.model_config.generation or is_demo_model(llm.engine.config.model)
    ours: dict[str, Any] = {"max_tokens": MAX_TOKENS} | ({"temperature": 0.0} if is_greedy else {})
    return llm, replace(llm.get_default_sampling_params(), **ours | given)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = FlexibleArgumentParser(prog="nanovllm", description=OVERVIEW, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", help="one of the above")

    chat = commands.add_parser("chat", description="A streaming chat in the terminal.")
    chat.add_argument("--system", help="a system message: how the model should behave")
    about = "an image that the first question is about, for a model that sees images; may be given several times"
    chat.add_argument("--image", action="append", default=[], metavar="FILE", help=about)
    generate = commands.add_parser("generate", description="Continues a text, word by word as it is generated.")
    generate.add_argument("prompt", nargs="?", help="the text (default: standard input)")
    batch = commands.add_parser("run-batch", description=RUN_BATCH, formatter_class=raw)
    batch.add_argument("-i", "--input-file", required=True, help="requests, one JSON object per line")
    batch.add_argument("-o", "--output-file", required=True, help="created, or continued if it exists")
    batch.add_argument(
        "--served-model-name", nargs="+", default=[], help="names that body.model may use besides the model's own"
    )
    batch.add_argument(
        "--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=PATH",
        help="adapters; body.model chooses one by its name",
    )  # fmt: skip
    analyze = commands.add_parser(
        "analyze",
        description="Reads a log of requests, one JSON object per line: chat `messages`, a `prompt` (text or ids), "
        "or lines in the OpenAI batch format; `cache_salt` is respected. Loads the tokenizer, not the weights.",
    )
    analyze.add_argument("log", help="requests.jsonl")
    analyze.add_argument("--block-size", type=int, default=16, help="tokens in a block of the KV pool (default: 16)")
    check = commands.add_parser("check-model", description=CHECK_MODEL, formatter_class=raw)
    check.add_argument("model", nargs="?", help=MODEL_HELP)
    checked = (f for f in fields(EngineConfig) if f.name in CHECKED_FLAGS)
    add_flags(check.add_argument_group("files"), checked, show_defaults=True)
    cache = commands.add_parser("cache", description="Shows what a directory of cached prefixes holds.")
    cache.add_argument("directory", help="the directory that --prefix-cache-dir named")
    smaller = cache.add_mutually_exclusive_group()
    smaller.add_argument(
        "--prune", metavar="SIZE", help="remove the least recently used until at most this much is left: 2G is 2 GiB"
    )
    smaller.add_argument("--clear", action="store_true", help="remove everything")
    bench = commands.add_parser(
        "bench", description="Random prompts, greedy, EOS ignored; a batch of each size is submitted at once."
    )
    sizes = [1, 2, 4, 8, 16, 32]
    bench.add_argument("--batch-sizes", type=int, nargs="+", default=sizes, metavar="N", help="(default: 1 to 32)")
    bench.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens (default: 128)")
    bench.add_argument("--output-len", type=int, default=64, metavar="N", help="output tokens (default: 64)")
    usage = "nanovllm serve [MODEL] [--flag VALUE ...]"
    serve = commands.add_parser("serve", description=SERVE_HELP, formatter_class=raw, usage=usage)
    serve.set_defaults(model=None)
    serve.add_argument("model", nargs="?", default=argparse.SUPPRESS, action=_OneModel, help=MODEL_HELP)
    # As vLLM's older commands have it.
    serve.add_argument("--model", default=argparse.SUPPRESS, action=_OneModel, help=argparse.SUPPRESS)
    add_grouped_flags(serve, fields(ServeOptions), GROUPS)

    for command in (chat, generate, batch, analyze, bench):
        command.add_argument("--model", help=MODEL_HELP)
    for command in (chat, generate):
        group = command.add_argument_group(
            f"sampling (default: {MAX_TOKENS} tokens; the rest as the checkpoint says, or greedy; "
            "the demo model: greedy)"
        )
        chosen = (f for f in fields(SamplingParams) if f.name in SAMPLING_FLAGS and f.name != "max_tokens")
        add_flags(group, chosen, show_defaults=False)
        about = f"most tokens to generate (default: {MAX_TOKENS})"
        group.add_argument("--max-tokens", type=int, default=argparse.SUPPRESS, metavar="N", help=about)
    for command in (serve, chat, generate, batch, bench):
        add_grouped_flags(command, (f for f in fields(EngineConfig) if f.name != "model"), ENGINE_GROUPS)
    add_vllm_flags(serve, neutral_options(SERVE))
    add_vllm_flags(batch, neutral_options(BATCH))
    return parser


if __name__ == "__main__":
    sys.exit(main())
