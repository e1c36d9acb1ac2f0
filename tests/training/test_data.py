"""Files to batches: what is read, and that every token is a target exactly once an epoch."""

from collections import Counter

import numpy as np
import pytest

from llama_jax.errors import ArgumentError
from training.data import (
    Rows,
    all_batches,
    encode_documents,
    join_documents,
    list_files,
    newline_ids,
    read_documents,
    split_stream,
    training_batches,
)
from training.vocabulary import vocabulary_from_texts, vocabulary_of


def stream(*lengths, counts=None):
    """Documents of these lengths; every token of all is a number of its own."""
    ids = np.split(np.arange(sum(lengths), dtype=np.int32), np.cumsum(lengths)[:-1])
    return join_documents((part, None if counts is None else counts[part]) for part in ids)


def targets(rows, epoch=0):
    """Every target that counts in an epoch, with how often."""
    found = Counter()
    for i in range(len(rows)):
        row = rows.row(i, epoch)
        found.update(row["targets"][row["weights"] > 0].tolist())
        real = row["weights"] > 0
        assert (row["tokens"][real] == row["targets"][real] - 1).all()  # the token before, in this stream
    return found


@pytest.mark.parametrize("T", [1, 5, 16, 100])
@pytest.mark.parametrize("lengths", [(2,), (40,), (1, 7, 1, 30, 2), (200, 33)])
def test_every_token_is_a_target_once_an_epoch(T, lengths):
    data = stream(*lengths)
    rows = Rows(data, T, seed=3)
    firsts = set(np.cumsum((0, *lengths))[:-1].tolist())
    expected = Counter(i for i in range(sum(lengths)) if i not in firsts)
    for epoch in range(3):
        assert targets(rows, epoch) == expected
    assert data.n_targets == len(expected)


def test_epochs_are_cut_differently():
    rows = Rows(stream(1000), 10, seed=0)
    assert len({rows.row(1, epoch)["tokens"][0] for epoch in range(8)}) > 3
    still = Rows(stream(1000), 10, moved=False)
    assert {still.row(1, epoch)["tokens"][0] for epoch in range(8)} == {10}


def test_documents_of_a_row_have_segments_of_their_own():
    rows = Rows(stream(4, 5, 20), 8, moved=False)
    row = rows.row(0)
    assert row["segments"].tolist() == [1] * 4 + [2] * 4
    assert row["weights"].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert not Rows(stream(30), 8).packed


def test_only_what_counts_is_a_target():
    counts = np.arange(30) % 3 == 0
    rows = Rows(stream(30, counts=counts), 7)
    assert targets(rows) == Counter(range(3, 30, 3))


def test_rows_behind_lines():
    data = stream(100)
    line_ids = [9, 19, 24, 59]
    rows = Rows(data, 20, line_ids=line_ids)
    starts = [int(rows.row(i)["tokens"][0]) for i in range(len(rows))]
    assert starts == [0, 20, 25, 45, 60, 80]  # behind a line's end where one is near enough
    assert targets(rows) == Counter(range(1, 100))


def test_a_split_shares_no_target():
    first, second = split_stream(stream(50, 50), 0.3)
    assert second is not None
    assert targets(Rows(first, 8)) + targets(Rows(second, 8)) == targets(Rows(stream(50, 50), 8))
    assert split_stream(stream(50), 0.0)[1] is None
    with pytest.raises(ArgumentError, match=r"The validation split is 0.95; it must be from 0 to 0.9."):
        split_stream(stream(50), 0.95)


@pytest.mark.parametrize(
    "options", [dict(threads=1), dict(threads=3), pytest.param(dict(workers=2), marks=pytest.mark.slow)]
)
def test_batches_go_on_where_others_ended(options):
    rows = Rows(stream(500, 70), 8, seed=1)
    whole = training_batches(rows, 4, seed=5)
    expected = [next(whole) for _ in range(40)]
    for n in (0, 3, 17, 25):
        rest = training_batches(rows, 4, seed=5, seen=4 * n, **options)
        for batch in expected[n : n + 12]:
            again = next(rest)
            for name, array in batch.items():
                np.testing.assert_array_equal(again[name], array)
    assert {a.shape for a in expected[0].values()} == {(4, 8)}


def test_epochs_of_batches_hold_every_row_and_differ_in_order():
    rows = Rows(stream(161), 8, moved=False)
    assert len(rows) == 20
    batches = training_batches(rows, 4, seed=0)
    epochs = [[int(t) for _ in range(5) for t in next(batches)["tokens"][:, 0]] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [8 * i for i in range(20)]
    assert epochs[0] != epochs[1]


def test_all_batches_fill_the_last_with_rows_that_do_not_count():
    batches = all_batches(Rows(stream(50), 8, moved=False), 4)
    assert [b["tokens"].shape for b in batches] == [(4, 8), (4, 8)]
    assert sum(float(b["weights"].sum()) for b in batches) == 49


# Files


def test_files_folders_and_json_lines(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("first\n")
    (tmp_path / "a.jsonl").write_text('{"text": "second"}\n\n"third"\n')
    (tmp_path / "picture.png").write_bytes(b"no text")
    assert [p.name for p in list_files([tmp_path])] == ["a.jsonl", "one.txt"]
    assert list(read_documents([tmp_path])) == ["second", "third", "first\n"]
    assert list(read_documents([tmp_path / "b" / "one.txt", tmp_path / "b"])) == ["first\n"] * 2


@pytest.mark.parametrize(
    ("name", "contents", "sentence"),
    [
        ("x.txt", "", "x.txt is empty; there is nothing to learn from it."),
        ("x.jsonl", "\n\n", "x.jsonl is empty"),
        ("x.jsonl", "{}\n", r"x.jsonl, line 1: \{\} is neither a string nor has a `text`."),
        ("x.jsonl", '"a"\n{nonsense\n', "x.jsonl, line 2: b'{nonsense' is not JSON."),
        ("x.png", "no data", "is no file or folder|holds no .txt, .jsonl, .md file"),
    ],
)
def test_bad_files_are_sentences(tmp_path, name, contents, sentence):
    (tmp_path / name).write_text(contents)
    with pytest.raises(ArgumentError, match=sentence):
        list(read_documents([tmp_path]))


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ArgumentError, match="is no file or folder; training data is text"):
        list(read_documents([tmp_path / "nothing"]))


def test_text_shorter_than_a_row_trains():
    tokenizer = vocabulary_of(None).tokenizer
    data = encode_documents(["Hi"], tokenizer)
    rows = Rows(data, 512)
    assert len(rows) == 1
    assert rows.row(0)["weights"].sum() == data.n_targets >= 2
    with pytest.raises(ArgumentError, match="fewer than two tokens"):
        join_documents([(np.zeros(1, np.int32), None)])


def test_a_vocabulary_is_made_of_the_data(tmp_path):
    texts = ["The quick brown fox jumps over the lazy dog.\nAnd the dog, it sleeps: 1234 ß.\n"] * 20
    source = vocabulary_from_texts(texts, 300)
    ids = source.tokenizer.encode(texts[0])
    assert source.tokenizer.decode(ids) == texts[0]
    assert source.tokenizer.vocab_size == 300
    assert len(ids) < len(texts[0])
    assert newline_ids(encode_documents(texts, source.tokenizer), source.tokenizer) == [3 + ord("\n")]
    assert source.save(tmp_path)
    from llama_jax.text.tokenizer import tokenizer_from_folder

    assert tokenizer_from_folder(tmp_path).encode(texts[0]) == ids
    with pytest.raises(ArgumentError, match="A vocabulary of 5000 pieces cannot be made of this text"):
        vocabulary_from_texts(texts, 5000)
