"""The README is true: its code runs, its transcript is real, its paths, options, types and table are right."""

import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib

import jax
import pytest

import llama_jax
from llama_jax.cli import options
from llama_jax.cli.main import COMMANDS, main
from llama_jax.quantization import BLOCK_TYPES
from tests.conftest import REPOSITORY
from tests.terminal import Screen

README = (REPOSITORY / "README.md").read_text()
SCRIPT = runpy.run_path(str(REPOSITORY / "scripts" / "readme_table.py"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_code_runs(number, capsys):
    code = blocks("python")[number]
    if "tensor_mesh(2)" in code and jax.device_count() < 2:
        pytest.skip("needs two devices")
    exec(compile(code, f"README block {number}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_the_three_uses_are_shown():
    assert len(blocks("python")) >= 3
    for name in (".generate(", ".stream(", ".chat(", "forward(", "generate_tokens", "tensor_mesh(", "save_gguf("):
        assert any(name in code for code in blocks("python"))


def transcripts() -> list[tuple[str, str]]:
    """Commands of the console blocks, each with what it writes to standard output."""
    found = []
    for text in blocks("console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, re.sub(r"^(llama_jax\.|load ).*\n", "", output, flags=re.MULTILINE)))
    return found


@pytest.mark.parametrize(("command", "screen"), [t for t in transcripts() if " chat " in t[0]])
def test_conversations(command, screen, tmp_path):
    """In a terminal: what stands behind a prompt is typed, and the screen shows the transcript."""
    if sys.platform != "linux":
        pytest.skip("pseudo-terminals as Linux has them")
    arguments = shlex.split(command)[1:]
    prompts = ["... ", "> "]
    if "--in-prefix" in arguments:
        prompts = [options.unescape(arguments[arguments.index("--in-prefix") + 1])]
    typed = re.findall(rf"(?:^|(?<=\n))({'|'.join(map(re.escape, prompts))})(.*)\n", screen)
    assert typed[-1][1] == "/exit"
    with Screen([sys.executable, "-m", "llama_jax", *arguments], tmp_path) as terminal:
        for prompt, line in typed:
            above, newline, last = prompt.rpartition("\n")
            terminal.wait_for(f"{above}{newline}\r{last}")  # the line editor is ready
            terminal.type(line + "\n")
        assert terminal.exit_code() == 0
        assert terminal.text == screen


@pytest.mark.parametrize(("command", "output"), [t for t in transcripts() if " chat " not in t[0]])
def test_transcripts(command, output, capsys, monkeypatch):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    name, *arguments = shlex.split(command)
    assert name == "llama-jax"
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == output.strip()
    assert output.strip()


def files() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def test_the_file_map_is_complete_and_true():
    named = re.findall(r"`([\w.-]+/[\w./-]*)`", section("Files"))
    assert len(named) > 20
    for path in named:
        assert (REPOSITORY / path).exists(), path
        assert (REPOSITORY / path).is_dir() == path.endswith("/"), path
    folders = tuple(path for path in named if path.endswith("/"))
    for path in files():
        if path.startswith(("llama_jax/", "training/", "scripts/", "docs/")) and path != "llama_jax/__init__.py":
            assert path in named or path.startswith(folders), f"{path} is not in the README's file map"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (REPOSITORY / target).exists(), target


def test_options_exist(capsys):
    texts = {}
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        texts[command] = capsys.readouterr().out
    option = r"(?<![\w-])--?[a-z][\w-]*"
    named = set(re.findall(option, "\n".join(re.findall(r"`([^`]+)`", section("Command line")))))
    assert len(named) > 15
    assert named <= set(re.findall(option, "\n".join(texts.values())))
    assert re.findall(r"llama-jax ([a-z |]+)`", section("Command line"))[0].split(" | ") == list(COMMANDS)


def test_types_are_those_that_can_be_read():
    (row,) = re.findall(r"^\| GGUF \|(.*)\|$", README, re.MULTILINE)
    readable = {name for name, t in BLOCK_TYPES.items() if t.dtype is None} | {"F32", "F16", "BF16"}
    assert set(re.findall(r"\b(?:B?F\d+|Q\d_\w+)\b", row)) == readable


def test_extras_and_version():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"'\.\[(\w+)\]'", README))
    assert {"test", "cuda13"} <= named <= set(project["optional-dependencies"])
    assert project["version"] == llama_jax.__version__
    assert f"## [{llama_jax.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()


# The table of measurements


def test_the_table_is_what_the_script_makes():
    assert SCRIPT["with_table"](README, SCRIPT["table"]()) == README


ENVIRONMENT = dict(device="NVIDIA H200", devices=1, cores=16, driver="1", jax="0.11.2", date="2026-12-01")


def test_the_table_knows_the_benchmarks(tmp_path):
    decode = dict(
        shape="llama-3-8b", weights="dense", batch=1, context=2048, dtype="bfloat16", tokens_per_second=1232.04,
        milliseconds=4.3214, gb_per_second=3480.2, share_of_limit=0.725, temporary_bytes=5,
        peak_bytes=17_340_000_000, compile_seconds=5.126,
    )  # fmt: skip
    cpu = dict(
        load_seconds=1.234, first_token_seconds=4.0, tokens_per_second=20.0, decode_tokens_per_second=24.04,
        gb_per_second=9.81, share_of_limit=None, transformers_tokens_per_second=None,
    )  # fmt: skip
    other = dict(kernel="flash", rows=4096, forward_seconds=0.25, ratio=1.23456, skipped=None)
    reports = [("decode", [decode, decode | dict(batch=8)]), ("cpu", [cpu]), ("attention_speed", [other])]
    for number, (name, results) in enumerate(reports):
        environment = ENVIRONMENT | (dict(device="cpu", cores=2) if name == "cpu" else {})
        report = dict(benchmark=name, environment=environment)
        (tmp_path / f"{number}.json").write_text(json.dumps(report | dict(results=results)) + "\n")
    where = "NVIDIA H200, jax 0.11.2, 2026-12-01 |"
    assert SCRIPT["table"](tmp_path).splitlines() == [
        "| what | measured | where |",
        "|---|---|---|",
        "| decoding, llama-3-8b shape, dense weights, 1 x 2048 tokens | 1,232.0 tok/s, step 4.321 ms, "
        f"memory 3,480.2 GB/s, share of the memory's limit 72%, peak memory 17.34 GB, compiling 5.13 s | {where}",
        "| decoding, llama-3-8b shape, dense weights, 8 x 2048 tokens | 1,232.0 tok/s, step 4.321 ms, "
        f"memory 3,480.2 GB/s, share of the memory's limit 72%, peak memory 17.34 GB, compiling 5.13 s | {where}",
        "| SmolLM2-135M, float32, one sequence | load 1.23 s, first token from process start, second start, 4.00 s, "
        "generate 20.0 tok/s, decode 24.0 tok/s, memory 9.8 GB/s | CPU, 2 cores, jax 0.11.2, 2026-12-01 |",
        f"| attention speed | kernel flash, rows 4,096, forward 0.25 s, ratio 1.235 | {where}",
    ]


def test_a_second_run_changes_nothing():
    text = f"before\n{SCRIPT['BEGIN']}\nold\n{SCRIPT['END']}\nafter\n"
    once = SCRIPT["with_table"](text, "| new |")
    assert once == f"before\n{SCRIPT['BEGIN']}\n| new |\n{SCRIPT['END']}\nafter\n"
    assert SCRIPT["with_table"](once, "| new |") == once


@pytest.mark.parametrize("text", ["none", f"{SCRIPT['BEGIN']} no end"])
def test_missing_markers_are_an_error(text):
    with pytest.raises(SystemExit, match="lacks the marker"):
        SCRIPT["with_table"](text, "")
