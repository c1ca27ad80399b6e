"""python -m nanovllm: the `nanovllm` command."""

import sys

from nanovllm.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
