"""What the lab of chapter 17 counts and compares: experts met, loads of ranks, three ways to one product."""

import pytest
import torch

from chapters.ch17_experts import large
from chapters.ch17_experts.chance import expected_met
from chapters.ch17_experts.sparse import busiest_rank, shares_of
from chapters.ch17_experts.tell import large_config, texts_of_all_kinds
from chapters.course import find_chapter
from chapters.recording import quoted_sheet
from nanovllm.features.experts.rows import sort_by_expert
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.kernels import TORCH_KERNELS


def test_texts_are_quoted_as_the_model_reads_them():
    """A bracket in a text is no markup."""
    rows = quoted_sheet(find_chapter(17).folder, "kind", "begins").rows
    assert rows == [[kind, text[:60].rstrip()] for kind, text in texts_of_all_kinds().items()]


@pytest.mark.parametrize("num_rows", [1, 2, 8, 40])
def test_experts_met(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    groups = [sort_by_expert(large.choose_at_random(num_rows, generator), large.NUM_EXPERTS) for _ in range(300)]
    met = [sum(count > 0 for _, count in group.counts) for group in groups]
    expected = expected_met(num_rows, large.NUM_EXPERTS, large.NUM_CHOSEN)
    assert sum(met) / len(met) == pytest.approx(expected, rel=0.02)


def test_loads():
    even = torch.arange(8).view(1, 4, 2).repeat(3, 1, 1)  # [layers, tokens, chosen]
    assert shares_of(even).tolist() == [[0.125] * 8] * 3
    assert [busiest_rank(shares_of(even), n) for n in (2, 4, 8)] == [1.0, 1.0, 1.0]
    alike = torch.tensor([[[0, 1], [0, 1]], [[6, 0], [6, 0]]])
    assert [busiest_rank(shares_of(alike), n) for n in (2, 8)] == [1.5, 4.0]


def test_sizes():
    """The model card says 30.5 billion, 29.9 without embeddings (both of them), 3.3 of them active."""
    sizes = large.sizes_of(large_config())
    assert sizes.total / 1e9 == pytest.approx(30.5, abs=0.05)
    assert (sizes.total - 2 * sizes.embedding) / 1e9 == pytest.approx(29.9, abs=0.05)
    assert (sizes.met(1) + sizes.embedding) / 1e9 == pytest.approx(3.35, abs=0.05)
    assert sizes.met(10_000) == pytest.approx(sizes.total - sizes.embedding)


@pytest.mark.parametrize("in_c", [False, True])
def test_three_ways_to_one_product(in_c, monkeypatch):
    monkeypatch.setattr(large, "NUM_EXPERTS", 12)
    monkeypatch.setattr(large, "IN_SIZE", 64)
    monkeypatch.setattr(large, "OUT_SIZE", 96)
    kernels = load_cpu_kernels(large_config(), torch.bfloat16) if in_c else TORCH_KERNELS
    if kernels is None:
        pytest.skip("no C kernels here")
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        weights = large.make_experts(kernels)
        groups = sort_by_expert(large.choose_at_random(9, generator), 12)
        x = torch.randn(9, 64, generator=generator).bfloat16()
        by_row, by_expert, one_pass = (way(kernels, x, weights, groups).float() for way in large.WAYS.values())
    torch.testing.assert_close(by_expert, one_pass, atol=0.05, rtol=0.02)
    torch.testing.assert_close(by_row, by_expert[groups.places.flatten()], atol=0.05, rtol=0.02)
