"""The key-value cache that is written in place, against the one of transformers."""

import torch
from transformers import DynamicCache, Qwen3Config

from stapo_lightning.rollout.growing_cache import GROWTH_TOKENS, growing_cache
from tests.builders import tiny_qwen3_config


def _states(rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, tokens, 8, generator=generator), torch.randn(rows, 1, tokens, 8, generator=generator)


def test_it_holds_what_transformers_own_cache_holds():
    config, tokens = tiny_qwen3_config(), 2 * GROWTH_TOKENS + 30  # past two growths
    caches = (growing_cache(config, 5 + tokens), DynamicCache(config=config))
    for cache in caches:
        cache.update(*_states(3, 5, seed=0), 0)
        cache.batch_repeat_interleave(2)
    rows = 6
    for step in range(tokens):
        found, expected = (cache.update(*_states(rows, 1, seed=1 + step), 0) for cache in caches)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        if step in (3, 70):
            rows -= 2
            for cache in caches:
                cache.batch_select_indices(torch.tensor([0, 2, 3, 5][:rows]))
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_a_token_is_written_in_place():
    cache = growing_cache(tiny_qwen3_config(), 200)
    cache.update(*_states(2, 5, seed=0), 0)
    places = {cache.update(*_states(2, 1, seed=step), 0)[0].data_ptr() for step in range(1, 9)}
    assert len(places) == 1


def test_room_ends_at_the_limit():
    cache = growing_cache(tiny_qwen3_config(), 7)
    for step in range(7):
        keys, values = cache.update(*_states(2, 1, seed=step), 0)
    assert keys.untyped_storage().nbytes() == values.untyped_storage().nbytes() == 2 * 7 * 8 * 4


def test_layers_with_a_window_stay_as_they_are():
    config = Qwen3Config(
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"],
    )
    kinds = [type(layer).__name__ for layer in growing_cache(config, 10).layers]
    assert kinds == ["GrowingLayer", "DynamicSlidingWindowLayer"]
