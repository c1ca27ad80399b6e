"""The lab's last part: machines for ten thousand users, estimated and simulated."""

from chapters.ch14_many_users.capacity import MACHINES, Limits, Load
from chapters.ch14_many_users.fleet import BLOCK_SIZE

LOAD = Load(167, 1500, 1000, 60, 128 * 1024)
LIMITS = Limits(ttft_s=1.0, token_s=0.055)
BOUGHT = (("small", 11), ("small", 12), ("small", 13), ("small", 14), ("small", 18), ("large", 5), ("large", 6))
OTHERS = {
    "as it was": LOAD,
    "a fifth more users": LOAD._replace(requests_per_s=200.0),
    "no shared beginning": LOAD._replace(num_shared_tokens=0),
    "8 times as many K/V bytes": LOAD._replace(kv_bytes_per_token=8 * LOAD.kv_bytes_per_token),
}


def room(name: str) -> int:
    """Tokens whose K and V the memory of such a machine holds."""
    return MACHINES[name].num_blocks(LOAD.kv_bytes_per_token) * BLOCK_SIZE


def num_seats(name: str) -> int:
    """So many requests fit even if all are as long as one can be."""
    return int((room(name) - LOAD.num_shared_tokens) / (1.5 * LOAD.num_own_tokens))


def whole_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"
