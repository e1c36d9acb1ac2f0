"""Sampling, constraints and JSON output of `llama-jax generate`, with a model that is quick to compile."""

import argparse
import json
import math

import pytest

from llama_jax import gbnf, json_schema, regex
from llama_jax.cli import generate, options
from llama_jax.cli.main import main
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_gguf(path)
    return str(path)


@pytest.fixture
def run(monkeypatch, capsys, model_path):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["generate", "-m", model_path, "-p", "ABBA", "-s", "1", "-n", "9", *arguments])
        return code, *capsys.readouterr()

    return call


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_defaults_are_those_of_python():
    from llama_jax.sampling.params import sampling_params

    defaults = {
        k: v for k, v in options.sampling_options(parsed(), 99).items() if k not in ("penalize_nl", "ignore_eos")
    }
    signature = {name: sampling_params.__kwdefaults__[name] for name in defaults}
    assert defaults == signature | {"seed": -1, "logit_bias": {}}


def test_every_option_arrives():
    arguments = """--seed 7 --samplers kt --temp 0.5 --dynatemp-range 0.2 --dynatemp-exp 2 --top-k 3 --top-p 0.9
        --min-p 0.1 --top-n-sigma 2 --typical 0.8 --tfs 0.7 --xtc-probability 0.6 --xtc-threshold 0.3 --min-keep 4
        --repeat-last-n -1 --repeat-penalty 1.2 --presence-penalty 0.1 --frequency-penalty 0.2 --no-penalize-nl
        --dry-multiplier 1.5 --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n 1000 --dry-sequence-breaker none
        --dry-sequence-breaker \\n --mirostat 2 --mirostat-lr 0.3 --mirostat-ent 4 -l 13-inf -l 5+1.5 --ignore-eos"""
    assert options.sampling_options(parsed(*arguments.split()), 99) == dict(
        seed=7, samplers="kt", temperature=0.5, dynatemp_range=0.2, dynatemp_exponent=2, top_k=3, top_p=0.9, min_p=0.1,
        top_n_sigma=2, typical_p=0.8, tfs_z=0.7, xtc_probability=0.6, xtc_threshold=0.3, min_keep=4, repeat_last_n=99,
        repeat_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2, penalize_nl=False, dry_multiplier=1.5,
        dry_base=2, dry_allowed_length=3, dry_penalty_last_n=99, dry_sequence_breakers=["\n"], mirostat=2,
        mirostat_eta=0.3, mirostat_tau=4, logit_bias={13: -math.inf, 5: 1.5}, ignore_eos=True,
    )  # fmt: skip
    assert options.sampling_options(parsed("--temp", "-1"), 9)["temperature"] == 0
    assert options.sampling_options(parsed("--sampler-seq", "kpt"), 9)["samplers"] == "kpt"


def test_grammars_come_from_the_line_or_a_file(tmp_path):
    notation, schema = 'root ::= "A"+', '{"type": "string"}'
    (tmp_path / "g.gbnf").write_text(notation)
    (tmp_path / "s.json").write_text(schema)
    assert options.grammar(parsed()) is None
    assert options.grammar(parsed("--grammar", notation)) == gbnf(notation)
    assert options.grammar(parsed("--grammar-file", str(tmp_path / "g.gbnf"))) == gbnf(notation)
    assert options.grammar(parsed("-j", schema)) == json_schema({"type": "string"})
    assert options.grammar(parsed("-jf", str(tmp_path / "s.json"))) == json_schema({"type": "string"})
    assert options.grammar(parsed("--regex", "A+")) == regex("A+")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-l", "13"], "--logit-bias is '13'; it must be like 15043+1.5 or 15043-inf."),
        (["-l", "5+1e999"], "logit_bias is inf; it must be a number or -inf, at most 3e+38."),
        (["-l", "64+1"], "A token id of logit_bias is 64; it must be an integer from 0 to 63."),
        (["--samplers", "best"], "samplers holds 'best'; it must be of penalties, dry, "),
        (["--mirostat", "3"], "mirostat is 3; it must be an integer from 0 to 2."),
        (["--dry-sequence-breaker", "", "--dry-multiplier", "1"], "A DRY sequence breaker is ''; only strings of"),
        (["--grammar", "root ::= ("], "Line 1 of the grammar has a mistake: ) is expected, not 'the end'."),
        (["--grammar-file", "/nowhere"], "The file '/nowhere' cannot be read: No such file or directory."),
        (["--json-schema", "{"], "The JSON schema is not JSON that can be read: "),
        (["--choices", "0"], "n is 0; it must be an integer from 1 to 1024."),
        (["--n-probs", "-1"], "logprobs is -1; it must be an integer from 0 to 1024."),
        (["--json", "--context-shift"], "--json, --choices and --n-probs do not go with --context-shift, --keep or"),
    ],
)
def test_a_wrong_value_is_one_sentence(run, arguments, sentence):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"llama-jax: {sentence}")


def test_json_tells_all_of_each_text(run):
    code, out, _ = run("--choices", "2", "--n-probs", "2", "--ignore-eos")
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    assert (first["index"], second["index"]) == (0, 1)
    assert first["text"] != second["text"]
    assert first["finish_reason"] == "length"
    assert len(first["tokens"]) == len(first["logprobs"]) == 9
    place = first["logprobs"][0]
    assert set(place) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert set(place["top_logprobs"][0]) == {"id", "token", "bytes", "logprob"}
    assert place["logprob"] <= place["top_logprobs"][0]["logprob"] < 0
    assert len(place["top_logprobs"]) == 2
    (nothing,) = map(json.loads, run("--json", "-n", "0")[1].splitlines())
    assert (nothing["text"], nothing["tokens"], nothing["stop"]) == ("", [], None)
    assert "logprobs" not in nothing


def test_a_constraint_holds(run):
    pytest.importorskip("llguidance")
    code, out, _ = run("--regex", "(XY){3}")
    assert (code, out) == (0, "XYXYXY\n")
    assert run("--grammar", 'root ::= "Q" | "R"')[1] in ("Q\n", "R\n")
