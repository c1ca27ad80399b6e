"""What vLLM was recorded to do."""

import json
from pathlib import Path

RECORDED = json.loads(Path(__file__).with_name("vllm_recorded.json").read_text(encoding="utf-8"))
