"""One engine in a process of its own: reads pieces of work from stdin, a JSON line each, and answers with seconds.

python -m chapters.ch11_benchmarks.peer NAME MODEL       NAME is one of ENGINES in examples/bench_peers.py
"""

import argparse
import json
import sys
import time

from chapters.course import ROOT


def main() -> None:
    name, model = sys.argv[1:]
    sys.path.append(str(ROOT.parent / "examples"))
    from bench_peers import make_engine

    engine = make_engine(name, argparse.Namespace(model=model, dtype="bfloat16", max_model_len=2048))
    print("ready", flush=True)
    for line in sys.stdin:
        work = [(prompt, num_output) for prompt, num_output in json.loads(line)]
        started = time.perf_counter()
        engine(work)
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
