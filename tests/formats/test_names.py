"""The tables of tensor names and the order of rotary rows."""

from __future__ import annotations

import numpy as np
import pytest

from llama_jax.formats import names
from llama_jax.formats.load import half_split_rows, interleave_rows

from .conftest import tiny_config


def test_every_path_has_a_name_in_both_formats_and_back():
    paths = names.parameter_shapes(tiny_config(n_layers=12))
    assert len(paths) == 3 + 12 * 9
    for to_name, to_path in ((names.gguf_name, names.path_of_gguf), (names.hf_name, names.path_of_hf)):
        assert len({to_name(path) for path in paths}) == len(paths)
        assert [to_path(to_name(path)) for path in paths] == list(paths)


def test_names_as_published():
    assert names.gguf_name("layers.11.w_down") == "blk.11.ffn_down.weight"
    assert names.hf_name("layers.11.ffn_norm") == "model.layers.11.post_attention_layernorm.weight"
    assert names.path_of_gguf("token_embd.weight") == "embedding"
    assert names.path_of_hf("lm_head.weight") == "output_head"
    for foreign in ("blk.0.attn_q.bias", "blk.01.attn_q.weight", "rope_freqs.weight", "blk.0.attn_q.weight.extra"):
        assert names.path_of_gguf(foreign) is None
    assert names.path_of_hf("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert names.is_derived_hf("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not names.is_derived_hf("model.layers.0.self_attn.q_proj.bias")
    with pytest.raises(KeyError):
        names.gguf_name("layers.0.bias")


def test_rotary_rows_by_the_definition():
    heads, width = 3, 8
    rows = np.arange(heads * width * 5).reshape(heads * width, 5)
    split = half_split_rows(rows, heads)
    for head in range(heads):
        for pair in range(width // 2):
            # Interleaved files rotate rows 2i and 2i+1 together; half-split ones i and i + E/2.
            for side in (0, 1):
                old, new = head * width + 2 * pair + side, head * width + pair + side * width // 2
                np.testing.assert_array_equal(split[new], rows[old])
    np.testing.assert_array_equal(interleave_rows(split, heads), rows)
    np.testing.assert_array_equal(half_split_rows(interleave_rows(rows, heads), heads), rows)
