"""The safetensors reader: against the safetensors library, and folders made to do harm."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from llama_jax.errors import ArgumentError, FormatError
from llama_jax.formats.safetensors import SafetensorsFolder, write_tensors


def document(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype="F32", shape=(2,), begin=0, end=8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


TWICE = b'{"t": %s, "t": %s}' % ((json.dumps(entry()).encode(),) * 2)

HOSTILE = {
    "empty": (b"", "is empty"),
    "short": (b"\x08\0\0", "cut short, damaged"),
    "giant length": (struct.pack("<Q", 2**63) + b"{" + bytes(20), "header would take 9223372036854775808 bytes"),
    "length past the end": (struct.pack("<Q", 100) + b"{}", "header would take 100 bytes of a file of 10"),
    "not JSON": (document(b"{nonsense"), "not valid JSON"),
    "not UTF-8": (document(b'{"\xff": 1}'), "not valid JSON"),
    "deep JSON": (document(b'{"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not valid JSON"),
    "giant number": (document(b'{"t":' + b"9" * 100_000 + b"}"), "not valid JSON"),
    "an array": (document(b"[1, 2]"), "not a safetensors file"),
    "pickle": (b"\x80\x02" + bytes(30), "a Python pickle"),
    "zip": (b"PK\x03\x04" + bytes(30), "a zip archive"),
    "gguf": (b"GGUF" + bytes(30), "a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
    "entry is a number": (document({"t": 5}), "'t' must be an object"),
    "unknown dtype": (document({"t": entry("F4")}, bytes(8)), "dtype 'F4'; known are"),
    "dtype is a list": (document({"t": entry([])}, bytes(8)), r"dtype \[\]; known are"),
    "negative shape": (document({"t": entry(shape=(-2,))}, bytes(8)), "lists of whole numbers"),
    "fractional shape": (document({"t": entry(shape=(2.0,))}, bytes(8)), "lists of whole numbers"),
    "giant shape": (document({"t": entry(shape=(2**62, 2**62))}, bytes(8)), "its data_offsets are 0 to 8"),
    "wrong size": (document({"t": entry(shape=(3,))}, bytes(8)), "needs 12 bytes; its data_offsets are 0 to 8"),
    "backwards": (document({"t": entry(begin=8, end=0)}, bytes(8)), "its data_offsets are 8 to 0"),
    "past the end": (document({"t": entry(begin=8, end=16)}, bytes(8)), "cut short or damaged"),
    "overlap": (document({"t": entry(), "u": entry(begin=4, end=12)}, bytes(12)), "'t' and 'u' overlap"),
    "hole": (document({"t": entry(), "u": entry(begin=12, end=20)}, bytes(20)), "4 bytes belong to no tensor"),
    "trailing bytes": (document({"t": entry()}, bytes(9)), "1 bytes belong to no tensor"),
    "duplicate name": (document(TWICE, bytes(8)), "holds 't' twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_give_one_clear_error_quickly_and_without_memory(tmp_path, case):
    content, message = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(FormatError, match=message) as caught:
            SafetensorsFolder(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - began < 1.0
    assert peak < 4 << 20
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_an_error(tmp_path):
    whole = document({"t": entry(), "u": entry(begin=8, end=16)}, bytes(16))
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole)
    SafetensorsFolder(tmp_path).close()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            SafetensorsFolder(tmp_path)


def _write_shards(folder, shards: dict[str, dict[str, np.ndarray]], weight_map: dict | None = None) -> None:
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_indexed_folders_read_what_the_library_wrote(tmp_path):
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = np.array([1.5, -3.0e38, 1e-40], ml_dtypes.bfloat16)
    c = np.array([[2.5]], np.float16)
    _write_shards(tmp_path, {"one.safetensors": {"a": a, "b": b}, "sub/two.safetensors": {"c": c}})
    (tmp_path / "unnamed.safetensors").write_bytes(b"garbage that no index names")
    with SafetensorsFolder(tmp_path) as folder:
        assert set(folder.tensors) == {"a", "b", "c"}
        for name, values in {"a": a, "b": b, "c": c}.items():
            assert folder.tensors[name].shape == values.shape
            assert folder.raw(name).tobytes() == values.tobytes()
        with pytest.raises(ArgumentError, match="no tensor 'd'"):
            folder.raw("d")
    with pytest.raises(ArgumentError, match="closed"):
        folder.raw("a")


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "/etc/passwd",
        "",
        "a\\b",
        "a\0b",
        "link.safetensors",
        "\ud800",
        "a\x1b[2Jb",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "secret.safetensors")
    os.symlink(tmp_path / "secret.safetensors", folder / "link.safetensors")
    _write_shards(folder, {}, {"a": name})
    with pytest.raises(FormatError, match="must lie inside of the folder"):
        SafetensorsFolder(folder)


def test_an_index_with_a_name_longer_than_any_file(tmp_path):
    _write_shards(tmp_path, {}, {"a": "x" * 5000})
    with pytest.raises(FormatError, match=r"inside of the folder|missing"):
        SafetensorsFolder(tmp_path)


def test_the_hub_cache_keeps_its_files_behind_links(tmp_path):
    snapshot = tmp_path / "models--x--y" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--x--y" / "blobs"
    blobs.mkdir()
    save_file({"a": np.ones(2, np.float32)}, blobs / "abc")
    os.symlink("../../blobs/abc", snapshot / "m.safetensors")
    _write_shards(snapshot, {}, {"a": "m.safetensors"})
    with SafetensorsFolder(snapshot) as folder:
        assert folder.raw("a").view(np.float32).tolist() == [1.0, 1.0]


ONE, TWO = np.ones(2, np.float32), np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("shards", "weight_map", "message"),
    [
        ({}, {"a": "x.safetensors"}, "names files that are missing: x.safetensors"),
        ({}, {"a": 5}, "weight_map must be an object"),
        ({}, [], "weight_map must be an object"),
        ({"x.safetensors": {"a": ONE}}, {"a": "x.safetensors", "b": "x.safetensors"}, "holds 'b'; it does not"),
        ({"x.safetensors": {"a": ONE}, "y.safetensors": {"a": TWO}}, None, "also stands in"),
        (
            {"x.safetensors": {"a": ONE}, "y.safetensors": {"b": TWO}},
            {"a": "y.safetensors", "b": "x.safetensors"},
            "says that y.safetensors holds 'a'; it does not",
        ),
    ],
)
def test_damaged_indexes(tmp_path, shards, weight_map, message):
    if message == "also stands in":
        weight_map = {"a": "x.safetensors", "b": "y.safetensors"}
    _write_shards(tmp_path, shards, weight_map)
    with pytest.raises(FormatError, match=message):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(FormatError, match=r"holds neither model\.safetensors nor"):
        SafetensorsFolder(tmp_path)


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(ArgumentError, match=r"missing/x\.safetensors cannot be written"):
        write_tensors(tmp_path / "missing" / "x.safetensors", {"a": np.zeros(2, np.float32)}, {})
    assert not list(tmp_path.iterdir())
