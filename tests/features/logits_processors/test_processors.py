"""LogitsProcessors: against plain Python."""

from types import SimpleNamespace

import torch

from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.logits_processors import prompt_ids
from nanovllm.features.logits_processors.processors import LogitsProcessors
from nanovllm.worker.sampler import SamplingBatch, sample


def test_masks_against_a_loop():
    """Allowed tokens, bad words, bias and what must not end yet, then penalties: against plain Python."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        logits = torch.randn(1, 40, generator=generator) * 4
        allowed = torch.randperm(40, generator=generator)[:12].tolist()
        params = SamplingParams(
            temperature=0,
            allowed_token_ids=allowed if seed % 2 else None,
            logit_bias={allowed[0]: 3.0, 39: -2.0},
            min_tokens=4,
            stop_token_ids=[allowed[1]],
            repetition_penalty=1.7,
        )
        seq = Sequence([3, 4], params)
        seq.tokens += [5, allowed[2]]
        banned = [allowed[3], allowed[4]]
        seq.parts["bad_words"] = SimpleNamespace(banned=lambda generated, ids=banned: ids, changes_logits=True)
        row = logits[0].tolist()
        if seed % 2:
            row = [x if i in allowed else -torch.inf for i, x in enumerate(row)]
        for banned in (allowed[3], allowed[4], allowed[1], 0):
            row[banned] = -torch.inf
        for token_id, bias in params.logit_bias.items():
            row[token_id] += bias
        for token_id in {3, 4, 5, allowed[2]}:
            row[token_id] = row[token_id] / 1.7 if row[token_id] > 0 else row[token_id] * 1.7
        [found], _ = sample(logits.clone(), SamplingBatch.from_sequences([seq], frozenset([0])))
        assert found == max(range(40), key=row.__getitem__)


def test_banned_tokens_give_way_where_nothing_else_is_allowed(llm):
    params = SamplingParams(allowed_token_ids=[40], max_tokens=4, ignore_eos=True, temperature=0)
    params.bad_words = [llm.get_tokenizer().decode([40])]
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == [40] * 4


def test_a_prompts_tokens_are_looked_through_once(llm, monkeypatch):
    """For all steps and samples of a request; each row has its own, once each."""
    made, prompts, from_sequences = [], [], LogitsProcessors.from_sequences

    def kept(seqs, eos_token_ids):
        made.append(([set(seq.tokens) for seq in seqs], from_sequences(seqs, eos_token_ids)))
        return made[-1][1]

    monkeypatch.setattr(LogitsProcessors, "from_sequences", kept)
    monkeypatch.setattr(prompt_ids, "frozenset", lambda ids: prompts.append(ids) or frozenset(ids), raising=False)
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, repetition_penalty=1.2, prompt_logprobs=0)
    llm.generate([[5, 6, 5, 7], [8, 8, 9]], params, use_tqdm=False)
    assert sorted(prompts) == [[5, 6, 5, 7], [8, 8, 9]]
    assert len(made) >= 6
    for seen, processors in made:
        rows, token_ids, _ = processors.seen
        places = [*zip(rows.tolist(), token_ids.tolist(), strict=True)]
        assert sorted(places) == sorted((row, token_id) for row, ids in enumerate(seen) for token_id in ids)
