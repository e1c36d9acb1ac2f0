"""The command line with the shipped model: in this process where that shows the same, else in one of its own."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import llama_jax
from llama_jax.cli import options
from llama_jax.cli.main import COMMANDS, main
from llama_jax.cli.usage import Parser
from tests.conftest import REPOSITORY
from tests.reference import llama_numpy
from tests.test_llama import GOLDEN, PROMPT
from tests.tiny import tiny_gguf

COMMAND = [sys.executable, "-m", "llama_jax.cli.main"]


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*arguments, stdin=...)` in this process: (exit code, stdout, stderr)."""
    # The compile cache is a setting of the whole process: other tests must not get it.
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of processes that start here: one compile cache for all of them, one device as a user has."""
    names = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    return names | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def start(environment):
    """`start(shell line after "llama-jax")` in a process of its own."""

    def call(line: str, **names: str) -> subprocess.CompletedProcess:
        script = f'llama_jax() {{ "{sys.executable}" -m llama_jax.cli.main "$@"; }}; llama_jax {line}'
        return subprocess.run(
            ["bash", "-c", script], cwd=REPOSITORY, env=environment | names, capture_output=True, check=False
        )

    return call


# Help and usage


def test_help_starts_no_jax():
    code = f"""
import sys
from llama_jax.cli.main import main
for arguments in [["--help"], ["--version"], *([c, "--help"] for c in {list(COMMANDS)})]:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0
heavy = {{"jax", "numpy", "jinja2", "tqdm", "tokenizers"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert f"usage: llama-jax {command}" in done.stdout


def test_help_takes_less_than_three_tenths_of_a_second():
    def seconds() -> float:
        started = time.perf_counter()
        subprocess.run([*COMMAND, "--help"], cwd=REPOSITORY, capture_output=True, check=True)
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["generate", "--nonsense"],
        ["generate", "-p", "x", "-n", "many"],
        ["generate", "-p", "x", "-c", "1.5"],
        ["generate", "-p", "x", "-s", "1e3"],
        ["generate", "-p", "x", "--temp", "warm"],
        ["generate", "-p", "x", "--dtype", "int8"],
        ["generate", "-p", "x", "-f", "y"],
        ["detokenize"],
        ["detokenize", "one"],
        ["generate", "-p", "x", "-t", "4"],
        ["generate", "-p", "x", "-te", "4"],
        ["generate", "-p", "x", "--tensor", "4"],
        ["generate", "-p", "x", "--threads", "4"],
        ["--vers"],
    ],
)
def test_wrong_usage_is_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    command = f"llama-jax {arguments[0]}" if arguments and arguments[0] in COMMANDS else "llama-jax"
    assert err.startswith(f"{command}: ")
    assert err.endswith(f"; see {command} --help\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("temperature", ["-1e30", "-1.5E-3", "-.5", "-2", "-inf"])
def test_a_negative_temperature_is_greedy_in_any_notation(temperature):
    parser = Parser()
    options.add_sampling_options(parser)
    assert options.sampling_options(parser.parse_args(["--temp", temperature]), 9)["temperature"] == 0


def test_a_value_may_stand_right_behind_a_short_option():
    parser = Parser()
    options.add_model_options(parser)
    arguments = parser.parse_args(["-c5", "-ctk", "f16"])
    assert (arguments.ctx_size, arguments.cache_type_k) == (5, "f16")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-c", "-1"], "n_ctx is -1; it must be an integer from 0 (the model's own) to 2147483647."),
        (["-b", "0"], "n_batch is 0; it must be an integer from 1 to 2147483647."),
        (["--temp", "nan"], "temperature is nan; it must be a finite number, 0 or above."),
        (["--temp", "inf"], "temperature is inf; it must be a finite number, 0 or above, at most 3e+38."),
        (["--top-p", "0"], "top_p is 0.0; it must be above 0 and at most 1."),
        (["--top-p", "1.1"], "top_p is 1.1; it must be above 0 and at most 1."),
        (["--min-p", "-1"], "min_p is -1.0; it must be from 0 to 1."),
        (
            ["--top-k", "9999999999"],
            "top_k is 9999999999; it must be an integer from -2147483647 to 2147483647; 0 or below keeps all tokens.",
        ),
        (["--repeat-penalty", "0"], "repeat_penalty is 0.0; it must be above 0."),
        (["--repeat-penalty", "1e-300"], "repeat_penalty is 1e-300; it must be above 0, at least 1e-37."),
        (["--repeat-penalty", "1e39"], "repeat_penalty is 1e+39; it must be above 0, at most 3e+38."),
        (
            ["--top-n-sigma", "-1e39"],
            "top_n_sigma is -1e+39; it must be a number, 0 or below for off, at least -3e+38.",
        ),
        (["-n", "9" * 20], f"max_tokens is {'9' * 20}; it must be from 0 to 2147483647, or None for no limit."),
        (["--repeat-last-n", "-2"], "repeat_last_n is -2; it must be an integer from 0 to 1048576."),
        (["--seed", str(2**70)], f"seed is {2**70}; it must be a 64-bit integer."),
        (["--stop", ""], "A stop string is ''; only strings of at least one character are allowed."),
        (["-c", "2"], "The prompt has 3 tokens; the context holds 2 (raise -c / n_ctx)."),
    ],
)
def test_a_wrong_value_is_1_and_a_sentence(run, arguments, sentence):
    code, out, err = run("generate", "-p", "x", "-n", "2", *arguments)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"llama-jax: {sentence}"


def test_sampling_options_are_checked_before_the_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr(options, "load_model", None)
    assert run("generate", "-p", "x", "--top-p", "2")[0] == 1
    assert run("chat", "--top-p", "2")[0] == 1


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["chat"], ["tokenize", "-p", "x"], ["info"]])
@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        (None, "' does not exist; give a .gguf file, a folder, or hf:owner/name."),
        ({}, " is a folder without config.json; name a Hugging Face folder or a .gguf file."),
        (b"", " is empty."),
        (b"Once upon a time\n" * 9, "Once"),
    ],
    ids=["missing", "folder", "empty", "text"],
)
def test_a_wrong_model_is_1_and_a_sentence(run, tmp_path, command, contents, sentence):
    path = tmp_path / "model.gguf"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents is not None:
        path.mkdir()
    code, out, err = run(*command, "-m", str(path))
    assert (code, out) == (1, "")
    assert err.startswith("llama-jax: ")
    assert str(path) in err
    assert sentence in err
    assert err.count("\n") == 1


def test_an_empty_model_path_is_not_the_shipped_model(run):
    sentence = "llama-jax: The model path is empty; give a .gguf file, a folder, or hf:owner/name.\n"
    assert run("info", "-m", "") == run("generate", "-p", "x", "-m", "") == (1, "", sentence)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("token_type", [2, 3, 3, *[1] * 60, -1], "Token 63 has the type -1; allowed are 1 to 6."),
        ("tokens", ["<unk>", "<s>", "</s>", *"ABC", "a\0b", *map(str, range(57))], "null character."),
    ],
)
def test_a_wrong_vocabulary_is_one_sentence_with_the_name_of_the_file(run, tmp_path, key, value, reason):
    path = tmp_path / "model.gguf"
    tiny_gguf(path, vocabulary={f"tokenizer.ggml.{key}": value})
    code, _, err = run("tokenize", "-p", "A", "-m", str(path))
    assert code == 1
    assert err.startswith(f"llama-jax: {path}: ")
    assert err.endswith(f"{reason}\n")
    assert not err.endswith("..\n")


def test_no_prompt(monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["tokenize"]) == 1
    assert (
        capsys.readouterr().err
        == "llama-jax: There is no prompt; give one with -p TEXT, -f FILE or on standard input.\n"
    )


def test_an_unreadable_prompt_file(run, tmp_path):
    code, _, err = run("generate", "-f", str(tmp_path / "none.txt"))
    assert code == 1
    assert err.startswith("llama-jax: The file ")
    assert err.endswith("cannot be read: No such file or directory.\n")
    assert run("tokenize", "-f", str(tmp_path))[2].endswith("cannot be read: Is a directory.\n")


def test_too_little_memory_is_1_and_a_sentence(run, monkeypatch):
    def load_model(arguments):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nmore\nlines")

    monkeypatch.setattr(options, "load_model", load_model)
    code, _, err = run("generate", "-p", "x")
    assert code == 1
    assert err.startswith("llama-jax: The device has too little memory")
    assert err.endswith("(RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes).\n")


def test_a_fault_of_the_program_is_not_hidden(run, monkeypatch):
    monkeypatch.setattr(options, "load_model", lambda arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("generate", "-p", "x")


# generate

GREEDY = ("-n", "8", "--temp", "0", "-s", "1")
EIGHT = "I am a gentleman of the Fair\n"


def test_generate(run):
    code, out, err = run("generate", "-p", PROMPT, *GREEDY)
    assert (code, out) == (0, EIGHT)
    assert err.splitlines()[-1].startswith("load ")
    assert "prompt 7 tokens" in err
    assert "GB/s" in err


def test_the_tokens_that_json_tells_give_the_text(run):
    code, out, _ = run("generate", "-p", PROMPT, *GREEDY, "--n-probs", "1")
    done = json.loads(out)
    assert (code, done["text"]) == (0, EIGHT.removesuffix("\n"))
    assert "".join(place["token"] for place in done["logprobs"]) == done["text"]
    assert bytes(byte for place in done["logprobs"] for byte in place["bytes"]).decode() == done["text"]


def test_a_prompt_from_a_file_loses_its_last_newline_only(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n")
    assert run("generate", "-f", str(path), *GREEDY)[1] == EIGHT


def test_a_prompt_from_standard_input(run):
    assert run("generate", *GREEDY, stdin=PROMPT.encode() + b"\n")[1] == EIGHT


def test_escapes(run):
    written = PROMPT.replace("\n", r"\n")
    assert run("generate", "-p", written, *GREEDY)[1] == EIGHT
    assert run("generate", "-e", "-p", written, *GREEDY)[1] == EIGHT
    with_backslash = run("tokenize", "--no-escape", "-p", written, "--ids")[1]
    assert with_backslash != run("tokenize", "-p", written, "--ids")[1]
    ids = [int(i) for i in with_backslash.strip("[]\n").split(", ")]
    assert run("detokenize", *map(str, ids))[1] == written + "\n"


@pytest.mark.parametrize(
    ("written", "text"), [(r"a\nb", "a\nb"), (r"\x41\t\\n", "A\t\\n"), (r"\q\x4", r"\q\x4"), (r"\'\"", "'\"")]
)
def test_unescape(written, text):
    assert options.unescape(written) == text


def test_stop(run):
    assert run("generate", "-p", PROMPT, *GREEDY, "--stop", "nobody", "--stop", "man of")[1] == "I am a gentle\n"
    assert (
        run("generate", "-p", PROMPT, "-n", "20", "--temp", "0", "--stop", r"\n\n")[1]
        == "I am a gentleman of the Fairy.\n"
    )


def test_display_prompt(run):
    assert run("generate", "-p", PROMPT, *GREEDY, "--display-prompt")[1] == PROMPT + EIGHT


def test_no_tokens(run):
    assert run("generate", "-p", PROMPT, "-n", "0", "--temp", "0")[:2] == (0, "\n")


def test_small_batches_give_the_same_text(run):
    assert run("generate", "-p", PROMPT, "-n", "40", "--temp", "0", "-b", "3")[1] == GOLDEN + "\n"


# tokenize, detokenize, info, perplexity


def test_tokenize_and_back(run):
    text = "To be, or not to be: that is the question — ßtraße 🎭"
    code, out, _ = run("tokenize", "-p", text, "--show-count")
    *lines, count = out.splitlines()
    ids = [line.split(" -> ")[0].strip() for line in lines]
    assert (code, count) == (0, f"Total number of tokens: {len(ids)}")
    assert lines[0] == "     1 -> '<s>'"
    assert run("tokenize", "-p", text, "--ids")[1] == f"[{', '.join(ids)}]\n"
    assert run("tokenize", "-p", text, "--ids", "--no-bos")[1] == f"[{', '.join(ids[1:])}]\n"
    assert run("detokenize", *ids)[1] == text + "\n"


def test_special_tokens_of_a_text(run):
    assert run("tokenize", "-p", "</s>", "--ids", "--no-bos")[1] == "[2]\n"
    plain = run("tokenize", "-p", "</s>", "--ids", "--no-bos", "--no-parse-special")[1]
    assert "[2]" not in plain
    assert plain.count(",") >= 2


@pytest.mark.parametrize("token", ["-1", "2048", "99999999999999999999"])
def test_unknown_ids_are_refused(run, token):
    sentence = f"llama-jax: The token id {token} is not in the vocabulary, 0 to 2047.\n"
    assert run("detokenize", "5", token) == (1, "", sentence)


def test_info_reads_no_weights(run, monkeypatch):
    from llama_jax.formats.load import ModelFile

    monkeypatch.setattr(ModelFile, "read", None)
    monkeypatch.setattr(ModelFile, "read_packed", None)
    code, out, err = run("info", "--tensors", "--metadata", "-c", "256")
    assert (code, err) == (0, "")
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert {"vocab_size 2048", "n_kv_heads 4", "context_length 512", "rope_scaling none"} <= lines
    assert "74 tensors, 6,426,880 parameters, 6.8 MB" in lines
    assert "Q8_0 57 tensors 6.8 MB" in lines
    # 6,426,880 x 4 bytes; 256 tokens x 2 x 8 layers x 4 heads x 32 x 4 bytes
    assert "memory for one sequence of 256 tokens" in lines
    assert "float32 weights 25.7 MB, KV cache 2.1 MB, together 27.8 MB" in lines
    assert "general.architecture = 'llama'" in lines
    assert any(line.startswith("layers.7.w_down blk.7.ffn_down.weight 256 x 704 Q8_0") for line in lines)


TEXT = "Now is the winter of our discontent\nMade glorious summer by this sun of York; " * 3


@pytest.mark.parametrize("chunks", [[], ["--chunks", "2"], ["--chunks", "-1"]])
def test_perplexity(run, chunks):
    model = llama_jax.load(dtype="float32")
    ids = model.tokenizer.encode(TEXT)
    assert len(ids) >= 64
    losses, expected = [], []
    for start in range(0, len(ids) // 32 * 32, 32):
        chunk = [1, *ids[start + 1 : start + 32]]
        logits = llama_numpy.logits(model.params, chunk, model.config)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += [-log_p[i - 1, chunk[i]] for i in range(17, 32)]
        expected.append(math.exp(np.mean(losses)))
    if chunks == ["--chunks", "2"]:
        expected = expected[:2]
    code, out, _ = run("perplexity", "-p", TEXT, "-c", "32", "--dtype", "f32", *chunks)
    line, last = out.splitlines()
    assert code == 0
    estimates = [float(part.split("]")[1]) for part in line.removesuffix(",").split(",")]
    np.testing.assert_allclose(estimates, expected, rtol=1e-4)
    assert last.startswith(f"Final estimate: PPL = {estimates[-1]:.4f} +/- ")


def test_perplexity_of_a_short_text(run):
    code, out, err = run("perplexity", "-p", "x")
    assert (code, out) == (1, "")
    assert "The text has 3 tokens; at least one chunk of 512 is needed (lower -c)." in err


# chat


def chat(run, *lines: str) -> tuple[list[str], str]:
    """The answers, one line each, and stderr."""
    code, out, err = run("chat", "-n", "8", "--temp", "0", "--stop", "\n", stdin="\n".join(lines).encode())
    assert code == 0
    return out.splitlines(), err


def test_chat(run, tmp_path):
    (answer,), err = chat(run, "Who is there?")
    assert answer == "He is a very villain."
    assert "load " in err
    file = tmp_path / "question.txt"
    file.write_text("Who is there?")
    answers, _ = chat(run, "Who is there?", "/regen", "", "/clear", f"/read {file}", "/exit", "Never read")
    assert answers == [answer] * 3
    second = chat(run, "Who is there?", "What news?")[0][1]
    answers, _ = chat(run, "What news?", "/clear", "Who is there?", "What \\", "news?")
    assert answers[1] == answer
    assert chat(run, "Who is there?", "What news?", "/regen")[0][1:] == [second] * 2


def test_mistakes_within_a_chat_do_not_end_it(run, tmp_path):
    answers, err = chat(run, "/regen", f"/read {tmp_path / 'none'}", "long " * 600, "Who is there?")
    assert answers == ["He is a very villain."]
    assert "There is no answer yet to give again." in err
    assert "cannot be read: No such file or directory." in err
    assert "tokens; the context holds 512" in err


def test_a_single_turn_that_fails_is_1(run):
    code, out, err = run("chat", "-st", "-p", "long " * 600)
    assert (code, out) == (1, "")
    assert "tokens; the context holds 512" in err.splitlines()[-1]


def test_a_system_prompt_stays_after_clear(run, monkeypatch):
    seen = []
    stream_chat = llama_jax.Llama.stream_chat
    monkeypatch.setattr(
        llama_jax.Llama, "stream_chat", lambda self, m, **o: seen.append(list(m)) or stream_chat(self, m, **o)
    )
    run("chat", "-n", "1", "--temp", "0", "-sys", "Enter a KING", stdin=b"Hail!\n/clear\nWho?\n")
    system = {"role": "system", "content": "Enter a KING"}
    assert seen == [[system, {"role": "user", "content": text}] for text in ("Hail!", "Who?")]


# Processes


def test_the_second_start_compiles_nothing(start, environment):
    cache = Path(environment["XDG_CACHE_HOME"])

    def entries() -> set[str]:
        return {p.name for p in cache.rglob("*") if p.is_file() and not p.name.endswith("-atime")}

    line = "generate -p x -n 8 --temp 0"
    first = start(line)
    made = entries()
    second = start(line)
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout != b""
    assert any("decode" in name for name in made)
    assert entries() == made
    assert {p.name for p in cache.iterdir()} == {"llama_jax"}


def test_without_a_place_for_the_cache(start, tmp_path):
    (tmp_path / "file").touch()
    done = start("generate -p x -n 1 --temp 0", XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 0
    first, *rest = done.stderr.decode().splitlines()
    assert first.startswith("llama_jax.cli: compiled programs are not kept: ")
    assert not [line for line in rest if "cache" in line or "Warning" in line]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("generate -p x -n 60 --temp 0 | head -c1", 0),
        ("generate -p x -n 4 --temp 0 >&-", 0),
        ("generate -p x -n 4 --temp 0 2>&-", 0),
        ("generate -p x -n 4 --temp 0 > /dev/full", 1),
        ("info | true", 0),
        ("chat -n 4 --temp 0 <&-", 0),
    ],
)
def test_broken_streams_end_quietly(start, line, code):
    if "/dev/full" in line and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    done = start(line)
    errors = done.stderr.decode()
    assert done.returncode == code, errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert ("No space left on device" in errors) == (code == 1)


def test_text_that_the_terminal_cannot_show(start):
    done = start("detokenize 1 198 172", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, b"?\n")


def test_bytes_that_are_not_text(run):
    code, out, _ = run("generate", "-n", "0", "--temp", "0", "--display-prompt", "-p", os.fsdecode(b"a\xff"))
    assert (code, out) == (0, "a?\n")
    assert run("chat", "-n", "1", "--temp", "0", stdin=b"a\xff\n")[0] == 0
    assert run("tokenize", "--ids", stdin=b"\xff") == run("tokenize", "--ids", "-p", "\N{REPLACEMENT CHARACTER}")


def test_ctrl_c_ends_without_a_traceback(environment):
    command = [*COMMAND, "generate", "-p", "x", "--temp", "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.parametrize("imported", ["argparse", "jax", "llama_jax.llama"])
def test_ctrl_c_during_an_import_ends_at_once(environment, imported):
    """The signal arrives within the import of a module, where some libraries swallow the exception."""
    code = f"""
import os, signal, sys
from llama_jax.cli import main
class Finder:
    def find_spec(name, path, target=None):
        if name == {imported!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("swallowed")
sys.modules.pop({imported!r}, None)
sys.meta_path.insert(0, Finder)
sys.argv = ["llama-jax", "generate", "-p", "x", "-n", "1"]
main.console()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_text_file_has_a_limit(run, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "_MOST_TEXT", 1 << 20)
    big = tmp_path / "big.txt"
    big.write_bytes(b"a" * ((1 << 20) + 1))
    code, _, err = run("tokenize", "-f", str(big))
    assert code == 1
    assert "longer than 1 MiB" in err


@pytest.mark.parametrize("value", ["0", "-2"])
def test_a_number_of_chunks_that_makes_no_sense(run, value):
    code, _, err = run("perplexity", "-p", "x", "--chunks", value)
    assert code == 1
    assert f"--chunks is {value}" in err


@pytest.mark.parametrize("platform", ["bogus", "cuda"])
def test_a_platform_that_is_not_there(start, platform):
    if platform == "cuda" and jax.default_backend() == "gpu":
        pytest.skip("there is one")
    done = start("generate -p x -n 1", JAX_PLATFORMS=platform)
    assert done.returncode == 1
    assert f"jax finds no device with JAX_PLATFORMS={platform}: " in done.stderr.decode().splitlines()[-1]
