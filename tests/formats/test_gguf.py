"""The GGUF reader: against the gguf package's writer, real vocabularies, and files made to do harm."""

from __future__ import annotations

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats.gguf import GGUFFile


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def key_value(key: str | bytes, kind: int, packed: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + packed


def tensor(name: str | bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def document(values=(), tensors=(), data=b"", *, version=3, n_values=None, n_tensors=None, align=32) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(values) if n_values is None else n_values)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + data


def write(tmp_path, content: bytes, name: str = "model.gguf"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


U32 = struct.pack("<I", 7)

HOSTILE = {
    "empty": (b"", "is empty"),
    "magic only": (b"GGUF", "ends inside the header"),
    "ggjt": (b"tjgg" + bytes(60), "a ggjt file of 2023"),
    "ggml": (b"lmgg" + bytes(60), "ggml file of early 2023"),
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "pickle": (b"\x80\x02" + bytes(60), "a Python pickle"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs pointer"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{}}' + bytes(60), "a safetensors file"),
    "noise": (b"\x01\x02\x03\x04" + bytes(60), r"unknown kind.*\\x01\\x02"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32), "big-endian"),
    "version 1": (document(version=1), "version is 1; it must be 2 or 3"),
    "version 9": (document(version=9), "version is 9"),
    "2^60 values": (document(n_values=2**60), "promises 1152921504606846976 metadata values"),
    "2^60 tensors": (document(n_tensors=2**60), "and 1152921504606846976 tensors"),
    "2^64-1 of both": (document(n_values=2**64 - 1, n_tensors=2**64 - 1), "cannot hold them"),
    "endless key": (document([struct.pack("<Q", 2**63) + b"key" + bytes(40)]), "ends inside a metadata key"),
    "endless string": (document([key_value("k", 8, struct.pack("<Q", 2**63))]), "ends inside the value of 'k'"),
    "array of 2^60 strings": (document([key_value("k", 9, struct.pack("<IQ", 8, 2**60))]), "inside the array 'k'"),
    "array of 2^60 numbers": (document([key_value("k", 9, struct.pack("<IQ", 12, 2**60))]), "inside the array 'k'"),
    "endless string in an array": (
        document([key_value("k", 9, struct.pack("<IQQ", 8, 1, 2**62) + bytes(32))]),
        "inside the array 'k', at string 0 of 1",
    ),
    "array of arrays": (document([key_value("k", 9, struct.pack("<IQ", 9, 1) + bytes(32))]), "array of arrays"),
    "array of an unknown type": (document([key_value("k", 9, struct.pack("<IQ", 77, 1))]), "elements of type 77"),
    "unknown value type": (document([key_value("k", 13, U32)]), "'k' has type 13"),
    "empty key": (document([key_value("", 4, U32)]), "non-empty UTF-8"),
    "key that is no text": (document([key_value(b"\xff", 4, U32)]), "non-empty UTF-8"),
    "duplicate key": (document([key_value("k", 4, U32)] * 2), "'k' stands twice"),
    "alignment 7": (document([key_value("general.alignment", 4, U32)]), "alignment is 7"),
    "alignment 0": (document([key_value("general.alignment", 4, bytes(4))]), "alignment is 0"),
    "alignment text": (document([key_value("general.alignment", 8, text("32"))]), "alignment is '32'"),
    "duplicate tensor": (
        document([], [tensor("t", (8,)), tensor("t", (8,), offset=32)], bytes(64)),
        "'t' stands twice",
    ),
    "long tensor name": (document([], [tensor("t" * 64, (8,))], bytes(32)), "1 to 63 bytes"),
    "five axes": (document([], [tensor("t", (1, 1, 1, 1, 1))], bytes(32)), "5 axes"),
    "2^32 axes": (document([], [text("t") + struct.pack("<I", 2**32 - 1)], bytes(64)), "4294967295 axes"),
    "IQ type": (document([], [tensor("t", (256,), 23)], bytes(256)), "type IQ4_XS; supported are F32"),
    "removed type": (document([], [tensor("t", (256,), 4)], bytes(256)), "type number 4"),
    "ragged row": (document([], [tensor("t", (48, 2), 2)], bytes(64)), "rows of 48 values; type Q4_0 needs a multiple"),
    "overflowing shape": (
        document([], [tensor("t", (2**32, 2**32, 2**32, 2**32))], bytes(64)),
        "cut short or damaged",
    ),
    "wrapping offset": (document([], [tensor("t", (8,), offset=2**64 - 32)], bytes(64)), "cut short or damaged"),
    "crooked offset": (document([], [tensor("t", (8,), offset=4)], bytes(64)), "offset 4; it must be a multiple of 32"),
    "overlap": (
        document([], [tensor("a", (16,)), tensor("b", (8,), offset=32)], bytes(64)),
        "'a' and 'b' overlap",
    ),
    "split count": (document([key_value("split.count", 5, struct.pack("<i", -1))]), "split.count is -1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_give_one_clear_error_quickly_and_without_memory(tmp_path, case):
    content, message = HOSTILE[case]
    path = write(tmp_path, content)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(FormatError, match=message) as caught:
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - began < 1.0
    assert peak < 1 << 20
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_an_error(tmp_path):
    whole = document(
        [key_value("k", 9, struct.pack("<IQ", 8, 2) + text("one") + text("two")), key_value("n", 4, U32)],
        [tensor("t", (8, 2)), tensor("u", (8,), offset=64)],
        bytes(96),
    )
    GGUFFile(write(tmp_path, whole)).close()
    for length in range(len(whole)):
        with pytest.raises(FormatError):
            GGUFFile(write(tmp_path, whole[:length]))


def test_a_directory_and_a_missing_file(tmp_path):
    with pytest.raises(FormatError, match="is a directory"):
        GGUFFile(tmp_path)
    with pytest.raises(ArgumentError, match="does not exist"):
        GGUFFile(tmp_path / "absent.gguf")


def test_all_value_types(tmp_path):
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**32 - 1, "int32": -(2**31)}
    numbers |= {"uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True}
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        writer.add_key_value(
            f"x.{kind}s", [value, 0, value], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind.upper()]
        )
    writer.add_string("x.text", "grüß ▁")
    writer.add_array("x.texts", ["a", "", "▁b"])
    writer.add_key_value("x.bytes", b"\xff\xfe", gguf.GGUFValueType.STRING)
    writer.add_array("x.some_bytes", [b"ok", b"\xff"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with GGUFFile(path) as file:
        for kind, value in numbers.items():
            assert file.metadata[f"x.{kind}"] == value
            assert type(file.metadata[f"x.{kind}"]) is type(value)
            array = file.metadata[f"x.{kind}s"]
            assert array.dtype.name == kind
            assert array.tolist() == [value, 0, value]
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["x.text"] == "grüß ▁"
        assert file.metadata["x.texts"] == ["a", "", "▁b"]
        assert file.metadata["x.bytes"] == b"\xff\xfe"
        assert file.metadata["x.some_bytes"] == ["ok", b"\xff"]


def test_version_2_alignment_gaps_and_raw_bytes(tmp_path):
    data = np.arange(256, dtype=np.uint8).tobytes()
    values = [key_value("general.alignment", 4, struct.pack("<I", 64))]
    # Out of order and with a gap between: allowed, since nothing overlaps.
    tensors = [tensor("b", (2, 3), offset=128), tensor("a", (8,), offset=0)]
    content = document(values, tensors, data, version=2, align=64)
    path = write(tmp_path, content)
    with GGUFFile(path) as file:
        assert file.tensors["b"].shape == (3, 2)
        assert file.tensors["b"].offset == len(content) - len(data) + 128
        assert file.raw("b").tobytes() == data[128:152]
        kept = file.raw("a")
        assert not kept.flags.writeable
        with pytest.raises(ArgumentError, match="no tensor 'c'"):
            file.raw("c")
    assert kept.tobytes() == data[:32]  # outlives the file
    with pytest.raises(ArgumentError, match="closed"):
        file.raw("a")


def _part(number: int, count: int, names: list[str], total: int = 3, split_no: int | None = None) -> bytes:
    values = [
        key_value("split.no", 2, struct.pack("<H", number if split_no is None else split_no)),
        key_value("split.count", 2, struct.pack("<H", count)),
        key_value("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    if number == 0:
        values.append(key_value("general.name", 8, text("split")))
    data = b"".join(np.full(8, ord(name), np.float32).tobytes() for name in names)
    return document(values, [tensor(name, (8,), offset=32 * i) for i, name in enumerate(names)], data)


def test_split_files_open_from_any_part(tmp_path):
    paths = [
        write(tmp_path, _part(i, 2, part), f"m-0000{i + 1}-of-00002.gguf") for i, part in enumerate([["a", "b"], ["c"]])
    ]
    for path in paths:
        with GGUFFile(path) as file:
            assert file.metadata["general.name"] == "split"
            assert list(file.tensors) == ["a", "b", "c"]
            for name in "abc":
                assert file.raw(name).view(np.float32).tolist() == [ord(name)] * 8


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({1: _part(0, 3, ["a"]), 3: _part(2, 3, ["c"])}, "missing beside it: m-00002-of-00003.gguf"),
        ({1: _part(0, 2, ["a"], 2), 2: _part(1, 2, ["a"], 2)}, "'a' also stands in m-00001-of-00002.gguf"),
        ({1: _part(0, 2, ["a"]), 2: _part(1, 2, ["b"])}, "hold 2 tensors; the first promises 3"),
        ({1: _part(0, 2, ["a"]), 2: _part(1, 2, ["b"], split_no=0)}, r"are \(0, 2\); the name says \(1, 2\)"),
    ],
)
def test_damaged_splits(tmp_path, parts, message):
    count = 3 if 3 in parts else 2
    paths = [write(tmp_path, content, f"m-0000{i}-of-0000{count}.gguf") for i, content in parts.items()]
    with pytest.raises(FormatError, match=message):
        GGUFFile(paths[0])


def test_split_keys_that_are_arrays(tmp_path):
    pair = struct.pack("<IQ2I", 4, 2, 0, 2)
    content = document([key_value(f"split.{key}", 9, pair) for key in ("no", "count", "tensors.count")])
    with pytest.raises(FormatError, match=r"split\.count is "):
        GGUFFile(write(tmp_path, content))
    values = [key_value("split.no", 9, pair), key_value("split.count", 2, struct.pack("<H", 2))]
    for i in (1, 2):
        path = write(tmp_path, document(values), f"m-0000{i}-of-00002.gguf")
    with pytest.raises(FormatError, match=r"split\.no and split\.count are "):
        GGUFFile(path)


def test_a_part_under_another_name_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"name must end in -00001-of-00002\.gguf"):
        GGUFFile(write(tmp_path, _part(0, 2, ["a"]), "renamed.gguf"))


def test_a_real_vocabulary_opens_fast_and_as_the_gguf_package_reads_it(vocabularies):
    path = vocabularies / "ggml-vocab-llama-spm.gguf"
    with GGUFFile(path) as file:
        metadata = file.metadata
    reader = gguf.GGUFReader(path)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        np.testing.assert_array_equal(metadata[key], reader.fields[key].contents())
    assert len(metadata) == len(reader.fields) - 3  # its version, tensor_count and kv_count are no keys of the file


def test_128k_tokens_and_280k_merges_open_in_time(vocabularies):
    path = vocabularies / "ggml-vocab-llama-bpe.gguf"
    times = []
    for _ in range(3):
        began = time.perf_counter()
        with GGUFFile(path) as file:
            times.append(time.perf_counter() - began)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 128256
    assert len(file.metadata["tokenizer.ggml.merges"]) == 280147
    assert min(times) < 0.5  # measured: 0.13 s
