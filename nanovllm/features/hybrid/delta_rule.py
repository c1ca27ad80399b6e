"""Gated DeltaNet in plain PyTorch, token by token: the reference, and what every device can compute (chapter 16).

    delta_net(x, net, state_layer, batch) -> [T, value_size]

x: [T, all of in_proj's outputs]. The convolution makes q, k and v of the numbers of a token and those before it; q and
k are scaled to length 1, q by key_dim ** -0.5 once more. A value head's state S [key_dim, value_dim] is changed and
read:

    S = decay * S                            decay = exp(-exp(A_log) * softplus(a + dt_bias)): between 0 and 1
    S = S + outer(k, beta * (v - S^T k))     beta = sigmoid(b): what the key gives now is corrected towards v
    output = S^T q                           then normed over the head, and multiplied by silu(z)

A loop over the tokens takes long: on a GPU it launches some fifteen kernels a token and layer.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.core.snapshots.segments import fresh_segments
from nanovllm.features.hybrid.batch_states import segments_of
from nanovllm.worker.batch import Batch

if TYPE_CHECKING:
    from nanovllm.features.hybrid.hybrid_layers import GatedDeltaNet

EPS = 1e-6  # of the lengths of q and k


def delta_net(x: Tensor, net: "GatedDeltaNet", state_layer: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """See above. The step's states are taken from slots of the pool and left there (core/snapshots/segments.py)."""
    sizes, table = net.sizes, segments_of(batch)
    segments = fresh_segments(batch.query_lens) if table is None else table.tolist()
    inputs, z, gates = x.split((sizes.conv_size, sizes.value_size, 2 * sizes.num_value_heads), dim=1)
    seen_by_state = torch.cat((inputs, gates), dim=1)  # what the log keeps of a row
    out = x.new_empty(len(x), sizes.num_value_heads, sizes.value_dim, dtype=torch.float32)
    for source, target, log_slot, first_logged, num_logged, first, num_rows, keeps in segments:
        rows = seen_by_state[first : first + num_rows]
        state = window = None
        if table is not None:
            states, windows, log = state_layer
            if keeps:
                log[log_slot, :num_rows] = rows
            rows = torch.cat((log[log_slot, first_logged : first_logged + num_logged], rows))
            if source >= 0:
                state, window = states[source, :, : sizes.key_dim, : sizes.value_dim], windows[source]
        if window is None:
            window = x.new_zeros(sizes.kernel_size - 1, sizes.conv_size)
        window = torch.cat((window, rows[:, : sizes.conv_size]))
        outputs, state = read_rows(window, rows[:, sizes.conv_size :].float(), state, net)
        out[first : first + num_rows] = outputs[num_logged:]
        if target >= 0:
            states[target, :, : sizes.key_dim, : sizes.value_dim] = state
            windows[target] = window[len(window) - sizes.kernel_size + 1 :]
    return norm_and_gate(out, z, net)


def norm_and_gate(out: Tensor, z: Tensor, net: "GatedDeltaNet") -> Tensor:
    """out: what was read, [T, value_heads, value_dim]. z: [T, value_size]."""
    normed = F.rms_norm(out, net.norm.weight.shape, net.norm.weight, net.norm.eps)
    return (normed.flatten(1) * F.silu(z.float())).to(z.dtype)


def read_rows(window: Tensor, gates: Tensor, state: Tensor | None, net: Any) -> tuple[Tensor, Tensor]:
    """Outputs [R, value_heads, value_dim] of R rows, and the state [value_heads, key_dim, value_dim] after them.

    window: what the convolution sees, [kernel_size - 1 + R, conv_size]. gates: b and a, [R, 2 * value_heads].
    """
    sizes = net.sizes
    mixed = F.silu((window.float().unfold(0, sizes.kernel_size, 1) * net.conv.weight).sum(-1))  # [R, conv_size]
    q, k, v = mixed.split((sizes.key_size, sizes.key_size, sizes.value_size), dim=1)
    q, k = (to_length_one(part.unflatten(1, (sizes.num_key_heads, -1))) for part in (q, k))
    group = sizes.num_value_heads // sizes.num_key_heads
    q, k = (part.repeat_interleave(group, dim=1) for part in (q * sizes.key_dim**-0.5, k))  # [R, value_heads, key_dim]
    v = v.unflatten(1, (sizes.num_value_heads, -1))
    beta, a = gates.sigmoid()[:, : sizes.num_value_heads], gates[:, sizes.num_value_heads :]
    decay = (-net.A_log.exp() * F.softplus(a + net.dt_bias)).exp()  # [R, value_heads]
    if state is None:
        state = v.new_zeros(sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
    outputs = torch.empty_like(v)
    for row in range(len(v)):
        state, outputs[row] = write_and_read(state, q[row], k[row], v[row], decay[row], beta[row])
    return outputs, state


def write_and_read(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence: what one token does to the state of every head, and what it reads there."""
    state = state * decay[:, None, None]
    found = (state * k[:, :, None]).sum(1)
    change = beta[:, None] * (v - found)
    state = state + k[:, :, None] * change[:, None]
    return state, (state * q[:, :, None]).sum(1)


def to_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def multiply_by_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [T, num_heads, head_dim]."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def add_gated(out: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """out += sigmoid(gate) * x, in place; out, x [T, size], gate [T, 1]."""
    return out.copy_(out.float() + gate.float().sigmoid() * x.float())
