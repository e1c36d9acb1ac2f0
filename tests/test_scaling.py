"""docs/scaling.md holds what scripts/scaling.py computes, and its rules of thumb follow from the same model."""

import runpy

import pytest

from llama_jax.config import PRESETS
from tests.conftest import REPOSITORY

SCRIPT = runpy.run_path(str(REPOSITORY / "scripts" / "scaling.py"))
DOCUMENT = (REPOSITORY / "docs" / "scaling.md").read_text()
EIGHT_B = PRESETS["llama-3.1-8b"]


def test_the_tables_are_what_the_script_makes():
    assert SCRIPT["with_tables"](DOCUMENT, SCRIPT["tables"]()[0]) == DOCUMENT


def test_one_gpu_decodes_as_measured():
    seconds = SCRIPT["decode_seconds"](EIGHT_B, 1, 1)
    cache = SCRIPT["CONTEXT"] * EIGHT_B.kv_bytes_per_token(2)
    assert seconds == pytest.approx((2 * 7.50e9 + cache) / 3.6e12, rel=0.01)


def test_what_does_not_fit_is_not_computed():
    big = PRESETS["llama-3.1-405b"]
    assert SCRIPT["decode_seconds"](big, 1, 4) is None
    assert SCRIPT["decode_seconds"](big, 1, 8) is not None
    assert SCRIPT["train_seconds"](EIGHT_B, SCRIPT["MeshShape"]()) is None


def test_sentences_of_the_document():
    one, eight = (SCRIPT["decode_seconds"](EIGHT_B, 1, t) for t in (1, 8))
    assert f"eight of them give {one / eight:.1f} times the speed" in DOCUMENT
    assert f"{1e3 * (2 * 32 + 1) * SCRIPT['MACHINE'].latency:.1f} ms a token" in DOCUMENT
    assert SCRIPT["with_tables"].__doc__
