"""The options -ngl, -lv, -mg, -ts, -sm of the command line and their environment variables."""

import argparse

import jax
import pytest

from llama_jax import Placement
from llama_jax.cli import options, placement
from llama_jax.cli.main import main
from llama_jax.placement import devices


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in placement._PLACEMENT_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    placement.add_placement_options(parser)
    return placement.placement(parser.parse_args(arguments))


def test_all_names():
    everything = Placement(gpu_layers=20, low_vram=True, main_gpu=1, tensor_split=(3, 1), split_mode="layer")
    assert parsed("-ngl", "20", "-lv", "-mg", "1", "-ts", "3,1", "-sm", "layer") == everything
    long = ["--low-vram", "--main-gpu=1", "--tensor-split=3/1", "--split-mode=layer"]
    assert parsed("--gpu-layers=20", *long) == parsed("--n-gpu-layers=20", *long) == everything
    assert parsed() == Placement()
    assert parsed("-ngl", "auto").gpu_layers == "auto"


def test_the_environment_speaks_where_options_do_not(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_N_GPU_LAYERS", "7")
    monkeypatch.setenv("LLAMA_ARG_TENSOR_SPLIT", "1,0,1")
    monkeypatch.setenv("LLAMA_ARG_LOW_VRAM", "1")
    monkeypatch.setenv("LLAMA_ARG_MAIN_GPU", "2")
    monkeypatch.setenv("LLAMA_ARG_SPLIT_MODE", "layer")
    shared = dict(low_vram=True, main_gpu=2, tensor_split=(1, 0, 1), split_mode="layer")
    assert parsed() == Placement(gpu_layers=7, **shared)
    assert parsed("-ngl", "9") == Placement(gpu_layers=9, **shared)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-ts", "1,x"], "--tensor-split is '1,x', in which 'x' is no number; it must be like 3,1."),
        (["-ts", "0,0"], "tensor_split is 0,0; its shares must be finite, 0 or above, and one of them above 0."),
        (["-ts", ""], "--tensor-split is '', in which '' is no number; it must be like 3,1."),
        (["-ngl", "-1"], "--gpu-layers is '-1'; it must be a whole number from 0 to 2147483647, 'all' or 'auto'."),
        (["-ngl", "many"], "--gpu-layers is 'many'; it must be a whole number from 0 to 2147483647, 'all' or 'auto'."),
        (["-mg", "-1"], "--main-gpu is '-1'; it must be a whole number from 0 to 2147483647."),
        (["-sm", "row"], "--split-mode is 'row'; it must be one of tensor, layer, none."),
        (["-sm", "tensor", "-ts", "3,1"], "tensor_split 3,1 has unequal shares, which split_mode 'tensor' cannot give; "
         "use 'layer' or equal shares."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_1_and_a_sentence(arguments, sentence, capsys, monkeypatch):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    assert main(["generate", "-p", "x", *arguments]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"llama-jax: {sentence}"


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    monkeypatch.setattr(devices, "gpus", lambda: tuple(jax.devices()[:2]))
    assert main(["generate", "-p", "x", "-mg", "9"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "llama-jax: main_gpu is 9; it must be a number from 0 to 1."


def test_the_log_of_a_run(caplog, monkeypatch):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    monkeypatch.setattr(devices, "gpus", lambda: tuple(jax.devices()[:1]))
    assert main(["generate", "-p", "x", "-n", "1", "-c", "32", "-ngl", "2"]) == 0
    lines = [record.getMessage() for record in caplog.records if record.name == "llama_jax.load"]
    assert "offloading 2 repeating layers to GPU" in lines
    (offloaded,) = [line for line in lines if line.startswith("offloaded 2/")]
    (total,) = [line for line in lines if line.startswith("total VRAM used: ")]
    assert lines.index(offloaded) < lines.index(total)
    assert "temporaries " in total
    assert "in host memory: weights " in total


def test_without_a_gpu_options_are_ignored_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(options, "cache_compiled_programs", lambda: None)
    parser = argparse.ArgumentParser()
    options.add_model_options(parser)
    options.load_model(parser.parse_args(["-ngl", "2", "-lv"]))
    lines = [record.getMessage() for record in caplog.records if record.name == "llama_jax.load"]
    assert lines[:2] == [
        "warning: jax finds no GPU (only cpu); --gpu-layers is ignored",
        "warning: jax finds no GPU (only cpu); --low-vram is ignored",
    ]
    assert not [line for line in lines if "offload" in line]
