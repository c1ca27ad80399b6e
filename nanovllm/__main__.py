"""python -m nanovllm: the `nanovllm` command."""

from nanovllm.tools.cli import main

raise SystemExit(main())
