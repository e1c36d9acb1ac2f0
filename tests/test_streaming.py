"""What a reader of `Llama.stream` may rely on, whatever tokens a model gives and however they arrive."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llama_jax
from llama_jax import Llama, Session
from tests.text.test_detokenize import cut

# Ids of the shipped vocabulary that make text difficult: bytes, among them those of whole characters, and words.
BYTES = [3 + b for b in "é€🎭\n ab".encode()]
WORDS = [455, 379, 265, 835]  # "▁G", "ood", "▁m", "orrow"
stops = st.lists(st.sampled_from(["ood", "Good m", "é", "a€", "\n", "ab a", "🎭b"]), max_size=3)


@pytest.fixture(scope="module")
def model() -> Llama:
    return llama_jax.load(n_ctx=64)


@given(
    ids=st.lists(st.sampled_from(BYTES + WORDS + [2]), max_size=40),
    sizes=st.lists(st.integers(1, 7), min_size=1),
    stops=stops,
)
@settings(max_examples=150, deadline=None)
def test_pieces_are_whole_characters_without_stop_strings_and_join_to_the_text(model, ids, sizes, stops):
    def generate(session, prompts, sampling, **options):
        at = 0
        while at < len(ids):
            size = sizes[at % len(sizes)]
            yield [ids[at : at + size]]
            at += size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "generate", generate)
        pieces = list(model.stream("x", stop=stops))
        unstreamed = model.generate("x", stop=stops)
    assert "".join(pieces) == unstreamed
    visible = [i for i in ids if i not in model.tokenizer.eog_ids]
    text = b"".join(map(model.tokenizer.token_bytes, visible)).decode("utf-8", "replace")
    assert unstreamed == cut(text, stops)[0]
    assert all(pieces)
    assert not any(stop in unstreamed for stop in stops)
    # Whole characters: only what is damaged in the whole text shows the replacement character.
    assert unstreamed.count("\N{REPLACEMENT CHARACTER}") <= text.count("\N{REPLACEMENT CHARACTER}")
