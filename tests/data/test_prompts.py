"""The order in which prompts are read, and their way into a batch."""

import itertools

import pytest
import torch

from stapo_lightning.batch import Prompt
from stapo_lightning.data.prompts import PromptLoader, PromptStream, TokenizedPrompts, collate


def _stream(num_prompts=10, prompts_per_batch=4, seed=0, rank=0, world_size=1, position=0):
    stream = PromptStream(num_prompts, prompts_per_batch, seed, rank, world_size)
    stream.position = position
    return stream


def _take(stream, batches):
    return list(itertools.islice(stream, batches))


@pytest.mark.parametrize(("num_prompts", "prompts_per_batch"), [(10, 4), (7, 3), (3, 5), (8, 8), (1, 2)])
def test_every_prompt_is_read_once_a_pass(num_prompts, prompts_per_batch):
    batches = _take(_stream(num_prompts, prompts_per_batch), 4 * num_prompts)
    assert all(len(batch) == prompts_per_batch for batch in batches)
    read = [pair for batch in batches for pair in batch]
    assert [number for _, number in read] == list(range(4 * num_prompts * prompts_per_batch))
    for start in range(0, len(read), num_prompts):
        assert sorted(index for index, _ in read[start : start + num_prompts]) == list(range(num_prompts))


def test_passes_and_seeds_differ_in_order():
    orders = set()
    for seed in (0, 1):
        read = [index for batch in _take(_stream(50, 10, seed), 15) for index, _ in batch]
        orders |= {tuple(read[start : start + 50]) for start in (0, 50, 100)}
    assert len(orders) == 6
    assert tuple(range(50)) not in orders


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_out_the_batch_of_one_rank(world_size):
    whole = _take(_stream(10, 12), 9)
    shares = [_take(_stream(10, 12, rank=rank, world_size=world_size), 9) for rank in range(world_size)]
    for number, batch in enumerate(whole):
        for rank in range(world_size):
            assert shares[rank][number] == batch[rank::world_size]


@pytest.mark.parametrize("world_size", [2, 4])
def test_mini_batches_hold_the_same_prompts_for_every_number_of_ranks(world_size):
    # 16 prompts a batch, 8 an update: update m reads places 8 m to 8 m + 7 of the batch, whoever reads them.
    (whole,) = _take(_stream(100, 16), 1)
    shares = [_take(_stream(100, 16, rank=rank, world_size=world_size), 1)[0] for rank in range(world_size)]
    a_rank = 8 // world_size
    for update in range(2):
        together = [pair for share in shares for pair in share[update * a_rank : (update + 1) * a_rank]]
        assert sorted(together) == sorted(whole[8 * update : 8 * update + 8])


@pytest.mark.parametrize("done", [1, 2, 5, 25])
def test_a_resumed_stream_goes_on_where_it_stood(done):
    # 10 prompts, 4 a batch: also inside a pass, at its end (5 batches are two passes) and ten passes later.
    for rank in (0, 1):
        whole = _take(_stream(rank=rank, world_size=2), done + 6)
        resumed = _take(_stream(rank=rank, world_size=2, position=4 * done), 6)
        assert resumed == whole[done:]


def test_a_second_iterator_starts_at_the_position():
    stream = _stream()
    first = _take(stream, 3)
    assert _take(stream, 3) == first
    stream.position = 4
    assert _take(stream, 2) == first[1:]


@pytest.mark.parametrize(("num_prompts", "expected"), [(10, 2), (8, 2), (4, 1), (3, 1)])
def test_length_is_about_one_pass(num_prompts, expected):
    assert len(_stream(num_prompts, 4)) == expected


PROMPTS = [Prompt(text=f"text {i}", answer=str(i)) for i in range(5)]
TOKENIZED = TokenizedPrompts(PROMPTS, [[5], [6, 7], [8, 9, 10], [11], [12, 13]])


def test_collate_pads_on_the_right_and_keeps_numbers():
    batch = collate([TOKENIZED[1, 40], TOKENIZED[2, 41], TOKENIZED[0, 42]])
    assert batch.prompts == [PROMPTS[1], PROMPTS[2], PROMPTS[0]] and len(batch) == 3
    assert batch.ids.tolist() == [[6, 7, 0], [8, 9, 10], [5, 0, 0]]
    assert batch.lengths.tolist() == [2, 3, 1]
    assert batch.uids.tolist() == [40, 41, 42]
    assert batch.ids.dtype == batch.lengths.dtype == batch.uids.dtype == torch.int64


def test_loader_reads_the_stream():
    loader = PromptLoader(TOKENIZED, batch_sampler=_stream(5, 2, seed=3), collate_fn=collate)
    batches = list(itertools.islice(loader, 5))
    assert [batch.uids.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    read = [prompt.text for batch in batches for prompt in batch.prompts]
    assert sorted(read[:5]) == sorted(read[5:]) == [prompt.text for prompt in PROMPTS]
    for batch in batches:
        for prompt, ids, length in zip(batch.prompts, batch.ids.tolist(), batch.lengths.tolist(), strict=True):
            assert ids[:length] == TOKENIZED.token_ids[PROMPTS.index(prompt)]
    assert len(TOKENIZED) == 5
