"""The pretend GPU itself: it computes what the CPU computes, and has a GPU's rules."""

import gc
from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.nn.functional as F

from tests.pretend_gpu import NAME, PretendTensor, pretend_gpu

DEVICE = f"{NAME}:0"
MODES = [torch.no_grad, torch.inference_mode]


@pytest.fixture(autouse=True)
def gpu():
    with pretend_gpu(total_bytes=1 << 24) as gpu:
        yield gpu


def numbers() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, 8), torch.randn(8, 6), torch.randint(0, 6, (5,)), torch.randn(6, 8) > 0]


def changed_in_place(a, b, i, m):
    a = a.clone()
    a[i] = 1.0
    a[m] = 2.0
    a[:, 1:3].add_(3).mul_(2)
    a.masked_fill_(a > 5, -1).index_add_(0, i, torch.ones_like(a[i]))
    return a


OPERATIONS: dict[str, Callable] = {
    "views": lambda a, b, i, m: a.view(2, 3, 8).transpose(0, 1).flatten(1).unflatten(1, (4, 4)).contiguous(),
    "reshape": lambda a, b, i, m: torch.cat((a.reshape(-1), b.T.reshape(-1), a.T.flatten())),
    "products": lambda a, b, i, m: F.linear(a @ b, b.T[:, :6], b[0]),
    "indices": lambda a, b, i, m: torch.cat((a[i], a[:, i].T[:, :4].repeat(1, 2), a.index_select(0, i))),
    "mask": lambda a, b, i, m: a[m],
    "nonzero": lambda a, b, i, m: m.nonzero(),
    "gather": lambda a, b, i, m: a.gather(1, a.argsort(1)[:, :3]).cumsum(1),
    "where": lambda a, b, i, m: torch.where(m, a, 0.0).clamp(min=-1).masked_fill(~m, -torch.inf).softmax(-1),
    "sort": lambda a, b, i, m: a.sort(dim=-1, descending=True, stable=True).indices + a.topk(3).indices[:, :1],
    "sdpa": lambda a, b, i, m: F.scaled_dot_product_attention(a[None], a[None], a[None], attn_mask=m[None, :, :6]),
    "norm": lambda a, b, i, m: F.rms_norm(a, (8,), b[:, 0], 1e-5) + F.silu(a),
    "in place": changed_in_place,
    "types": lambda a, b, i, m: a.to(torch.float16).float().half().view(torch.int16).int(),
    "bytes": lambda a, b, i, m: a.flatten().view(torch.uint8)[4:24].view(torch.int32),
    "split": lambda a, b, i, m: torch.stack([*(x.sum(-1) for x in a.split((3, 3))), *(x.amax(-1) for x in a.chunk(2))]),
    "unique": lambda a, b, i, m: i.unique(return_counts=True)[1],
    "searchsorted": lambda a, b, i, m: torch.searchsorted(a.softmax(-1).cumsum(-1), torch.full_like(a[:, :1], 0.5)),
    "made there": lambda a, b, i, m: (
        a.new_zeros(3, 4) + a.new_full((3, 4), 2) + torch.ones_like(a)[:3, :4] + torch.arange(4, device=a.device)
    ),
    "copied into": lambda a, b, i, m: a.new_empty(6, 8).copy_(b.T),
    "repeat_interleave": lambda a, b, i, m: a.repeat_interleave(2, dim=1),
    "unfold": lambda a, b, i, m: a.unfold(0, 3, 1).sum(-1),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_computes_what_the_cpu_computes(name, mode):
    given = numbers()
    with mode():
        expected = OPERATIONS[name](*given)
        found = OPERATIONS[name](*(x.to(DEVICE) for x in given))
        assert isinstance(found, PretendTensor) and found.is_cuda
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_in_float32(mode, dtype):
    """PyTorch has it since 2.8."""
    a, b, *_ = (x.to(dtype) for x in numbers())
    with pytest.raises(TypeError, match="out_dtype"):
        torch.mm(a.to(DEVICE), b.to(DEVICE), out_dtype=torch.float32)
    with pretend_gpu(torch_version=(2, 8)), mode():
        found = torch.mm(a.to(DEVICE), b.to(DEVICE), out_dtype=torch.float32)
        assert found.dtype == torch.float32 and torch.equal(found.cpu(), a.float() @ b.float())


@pytest.mark.parametrize("mode", MODES)
def test_a_change_through_a_view_is_seen_everywhere(mode):
    with mode():
        x = torch.zeros(4, 4, device=DEVICE)
        rows, column = x[1:3], x[:, 0]
        x[2] += 1
        column.copy_(torch.arange(4.0).to(DEVICE))
        assert rows.tolist() == [[1, 0, 0, 0], [2, 1, 1, 1]]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y,
        lambda x, y: torch.cat((x, y)),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: F.embedding(y.long(), x),
        lambda x, y: x.copy_(x + y),
    ],
)
def test_tensors_of_two_devices(operation):
    x, y = torch.ones(3, 3, device=DEVICE), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        operation(x, y)


def test_what_may_come_from_the_host(gpu):
    x = torch.ones(3, device=DEVICE)
    gpu.reset_counts()
    assert (x * torch.tensor(2.0) + 1).shape == (3,)
    assert (gpu.counts.h2d, gpu.counts.syncs, gpu.counts.launches) == (0, 0, 2)
    x[torch.tensor([0, 2])] += 1  # indices of the host are copied and waited for: to read and to write
    assert (gpu.counts.h2d, gpu.counts.syncs) == (2, 2)


def test_copies_and_waits_are_counted(gpu):
    gpu.reset_counts()
    x = torch.ones(4, 4).pin_memory().to(DEVICE, non_blocking=True)
    assert (gpu.counts.h2d, gpu.counts.syncs) == (1, 0)
    x = torch.ones(4, 4).to(DEVICE)
    assert (gpu.counts.h2d, gpu.counts.syncs) == (2, 1), "who copies from ordinary memory waits"
    for read in (lambda x: x.tolist(), torch.Tensor.cpu, lambda x: x.sum().item(), lambda x: bool((x > 0).all())):
        before = gpu.counts.d2h, gpu.counts.syncs
        read(x)
        assert (gpu.counts.d2h, gpu.counts.syncs) == (before[0] + 1, before[1] + 1)
    for wait in (torch.Tensor.nonzero, lambda x: x[x > 0], torch.cuda.synchronize):
        before = gpu.counts.syncs
        wait(x)
        assert gpu.counts.syncs == before + 1
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def recorded(operation: Callable[[], torch.Tensor], pool=None, **options) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, **options):
        result = operation()
    return graph, result


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.isfinite().all()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.ones(2, device="cpu").to(DEVICE),
        lambda x: x.copy_(torch.ones(2)),
        lambda x: x[torch.tensor([1])],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.empty_cache(),
    ],
)
def test_what_a_recording_does_not_allow(forbidden):
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="capturing"):
        recorded(lambda: forbidden(x))
    x.sum().item()  # the recording has ended


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_another_thread_allocates_while_a_graph_is_recorded(mode):
    errors = []

    def allocate():
        try:
            torch.zeros(2, device=DEVICE).tolist()
        except RuntimeError as error:
            errors.append(str(error))

    def operation():
        thread = Thread(target=allocate)
        thread.start()
        thread.join()
        return torch.ones(2, device=DEVICE)

    graph, _ = recorded(operation, capture_error_mode=mode)
    assert ["another thread" in error for error in errors] == [True] * (mode == "global")
    assert len(graph.operations) == 1


def test_a_recording_is_made_on_a_stream_of_the_device():
    x, stream = torch.ones(2, device=DEVICE), torch.cuda.Stream(DEVICE)
    graph, _ = recorded(lambda: x + 1, stream=stream)
    with pytest.raises(AssertionError, match="another stream"):
        recorded(lambda: x + 1, graph.pool(), stream=torch.cuda.Stream(DEVICE))
    torch.cuda.set_device(1)
    recorded(lambda: x + 1, graph.pool(), stream=stream)
    with pytest.raises(RuntimeError, match="launched on GPU 1 takes tensors of GPU 0"):
        recorded(lambda: x + 1)


def test_the_current_device_is_that_of_a_thread():
    found = []
    torch.cuda.set_device(1)
    with torch.cuda.device(torch.device(DEVICE)):
        thread = Thread(target=lambda: found.append(torch.cuda.current_device()))
        torch.cuda.set_device(2)
        thread.start()
        thread.join()
    assert (torch.cuda.current_device(), found) == (1, [0])


def test_after_a_fault_everything_fails(gpu):
    x = torch.ones(2, device=DEVICE)
    gpu.fault = "an illegal memory access"
    for use in (lambda: x + 1, x.tolist, torch.cuda.synchronize, lambda: torch.ones(2).to(DEVICE)):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            use()


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_computes_on_the_memory_it_was_recorded_with(gpu, mode):
    with mode():
        x = torch.ones(2, device=DEVICE)
        total = torch.zeros(2, device=DEVICE)

        def operation():
            total.add_(x)
            return (x.view(1, 2) * 2 + 1).flatten()

        graph, result = recorded(operation)
        total.zero_()
        x.copy_(torch.tensor([3.0, 4.0]))
        graph.replay()
        assert (result.tolist(), total.tolist()) == ([7, 9], [3, 4])
        graph.replay()
        assert (result.tolist(), total.tolist()) == ([7, 9], [6, 8])
        assert gpu.counts.replays == 2


def test_a_buffer_that_is_made_anew_is_not_the_one_that_was_recorded():
    x = torch.ones(2, device=DEVICE)
    graph, result = recorded(lambda: x * 2)
    kept = x
    x = torch.full((2,), 5.0, device=DEVICE)
    graph.replay()
    assert result.tolist() == [2, 2]
    del kept  # its memory is somebody else's now
    gc.collect()
    graph.replay()
    assert result.isnan().all()


def test_memory_is_counted():
    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    before, total = torch.cuda.mem_get_info()
    assert before == total == 1 << 24
    x = torch.empty(1 << 18, device=DEVICE)  # 1 MiB
    assert torch.cuda.memory_allocated() == 1 << 20 == total - free()
    part = x[:10]
    del x
    assert torch.cuda.memory_allocated() == 1 << 20, "a view keeps it"
    torch.cuda.reset_peak_memory_stats()
    y = (part + 1).repeat(1 << 12)
    assert torch.cuda.max_memory_allocated() == (1 << 20) + 512 + 40 * (1 << 12)
    del part, y
    assert torch.cuda.memory_allocated() == 0 and free() < total, "the allocator keeps what was freed"
    torch.cuda.empty_cache()
    assert free() == total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 23, device=DEVICE)


def test_graphs_share_the_memory_of_a_pool():
    x = torch.ones(1 << 10, device=DEVICE)  # 4 KiB
    first, a = recorded(lambda: (x + 1) * 2)
    taken = torch.cuda.mem_get_info()[0]
    second, b = recorded(lambda: (x + 2) * 3, first.pool())
    assert taken - torch.cuda.mem_get_info()[0] == 4096, "only the second result is new"
    del first, second, a, b
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == (1 << 24) - 4096


def test_new_memory_holds_garbage():
    with torch.device(DEVICE):
        assert torch.empty(3).isnan().all() and torch.empty(2, dtype=torch.int64).tolist() == [-1, -1]
    assert torch.empty_like(torch.ones(2, device=DEVICE)).isnan().all()
