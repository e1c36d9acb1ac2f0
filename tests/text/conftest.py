"""Vocabularies for the tests of this room: two tiny ones made here, and real ones where they are at hand."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from llama_jax.text.bpe import BYTE_OF_CHARACTER
from llama_jax.text.tokenizer import Tokenizer, tokenizer_from_gguf

REPOSITORY = Path(__file__).resolve().parents[2]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file; skips the test where there is none."""
    named = os.environ.get("LLAMA_JAX_SMOLLM2")
    found = [Path(named)] if named else sorted((REPOSITORY / "models").glob("SmolLM2-135M-Instruct*.gguf"))
    if not found or not found[0].is_file():
        pytest.skip("needs models/SmolLM2-135M-Instruct.Q4_1.gguf or LLAMA_JAX_SMOLLM2")
    return found[0]


def shared_path(name: str) -> Path:
    """A file of the shared folder beside the checkout; skips the test where there is none."""
    folder = Path(os.environ.get("LLAMA_JAX_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / name).is_file():
        pytest.skip(f"needs {name} in ../shared or LLAMA_JAX_SHARED")
    return folder / name


def gguf_metadata(path: Path) -> dict[str, object]:
    """The `tokenizer.*` keys of a GGUF file; the gguf package's reader takes 8 s for 128k tokens, this one 0.3 s."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 8

        def take(form: str) -> Any:
            nonlocal at
            (value,) = struct.unpack_from("<" + form, data, at)
            at += struct.calcsize("<" + form)
            return value

        def value(kind: int) -> Any:
            nonlocal at
            if kind == 8:
                size = take("Q")
                at += size
                return data[at - size : at].decode()
            if kind == 9:
                kind, count = take("I"), take("Q")
                return [value(kind) for _ in range(count)]
            return take("BbHhIif?__Qqd"[kind])

        _, keys = take("Q"), take("Q")
        found = {value(8): value(take("I")) for _ in range(keys)}
    return {key: item for key, item in found.items() if key.startswith("tokenizer.")}


def tiny_spm(**changes: object) -> dict[str, object]:
    """A SentencePiece vocabulary of 275 tokens: 256 bytes, some letters and merges, special tokens."""
    normal = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "é": -5.0, "ab": -6.0, "bc": -5.5, "▁a": -7.0, "abc": -8.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *normal]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(normal)]
    scores = [0.0] * 259 + list(normal.values())
    for text, kind in (
        ("<|end|>", CONTROL), ("<|en", CONTROL), ("<tool>", USER_DEFINED), ("<|eot_id|>", NORMAL),
        ("d", UNUSED), ("[PAD273]", UNUSED), ("ab", NORMAL),
    ):  # fmt: skip
        tokens.append(text)
        types.append(kind)
        scores.append(-9.0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def tiny_bpe(**changes: object) -> dict[str, object]:
    """A byte-level vocabulary: 256 bytes, the merges of "hello" and of " world", special tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
    tokens = [
        *BYTE_OF_CHARACTER,
        *(m.replace(" ", "") for m in merges),
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "[PAD268]",
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * 265 + [CONTROL, CONTROL, USER_DEFINED, UNUSED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 265,
        "tokenizer.ggml.eos_token_id": 266,
        **changes,
    }


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return tokenizer_from_gguf(tiny_spm())


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return tokenizer_from_gguf(tiny_bpe())


@pytest.fixture(scope="session")
def llama2() -> Tokenizer:
    return tokenizer_from_gguf(gguf_metadata(shared_path("data/ggml-vocab-llama-spm.gguf")))


@pytest.fixture(scope="session")
def llama3_metadata() -> dict[str, object]:
    return gguf_metadata(shared_path("data/ggml-vocab-llama-bpe.gguf"))


@pytest.fixture(scope="session")
def llama3(llama3_metadata: dict[str, object]) -> Tokenizer:
    return tokenizer_from_gguf(llama3_metadata)


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, object]:
    return gguf_metadata(smollm2_path())


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, object]) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_metadata)
