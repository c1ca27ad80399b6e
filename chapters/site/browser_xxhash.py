"""xxhash in a browser: what nanovllm/core and the labs use of it, with the same digests, on xxhash-wasm.

The bundle has it as xxhash.py. worker.js has registered the JavaScript module.
"""

import xxhash_wasm
from pyodide.ffi import to_js


def xxh64_digest(data: bytes) -> bytes:
    return int(xxhash_wasm.h64Raw(to_js(data))).to_bytes(8, "big")


def xxh32_intdigest(data: bytes) -> int:
    return int(xxhash_wasm.h32Raw(to_js(data)))
