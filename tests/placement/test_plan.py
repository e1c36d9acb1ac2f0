"""The plan is a pure function: what a request comes to, and what the log says, without a device."""

import pytest

from llama_jax import ArgumentError, Placement
from llama_jax.placement.plan import Sizes, parse_shares, plan

L = 32


@pytest.mark.parametrize(
    ("gpu_layers", "repeating", "output", "v_cache", "k_cache", "offloaded"),
    [
        (0, 0, False, False, False, 0),
        (1, 1, False, False, False, 1),
        (L - 1, L - 1, False, False, False, L - 1),
        (L, L, False, False, False, L),
        (L + 1, L, True, False, False, L + 1),
        (L + 2, L, True, True, False, L + 2),
        (L + 3, L, True, True, True, L + 3),
        (L + 4, L, True, True, True, L + 3),
        (10**6, L, True, True, True, L + 3),
        ("all", L, True, True, True, L + 3),
    ],
)
def test_units_at_their_boundaries(gpu_layers, repeating, output, v_cache, k_cache, offloaded):
    p = plan(L, None, ["gpu"], gpu_layers=gpu_layers)
    assert (p.gpu_layers, p.output_on_gpu, p.v_cache_on_gpu, p.k_cache_on_gpu) == (repeating, output, v_cache, k_cache)
    assert p.units == (offloaded, L + 3)
    assert [p.layer_on_gpu(i) for i in range(L)] == [i >= L - repeating for i in range(L)]  # the last ones
    assert p.batch_size(512) == 512

    low = plan(L, None, ["gpu"], gpu_layers=gpu_layers, low_vram=True)
    assert (low.gpu_layers, low.output_on_gpu, low.v_cache_on_gpu, low.k_cache_on_gpu) == (
        repeating, output, False, False,
    )  # fmt: skip
    assert low.units == (min(offloaded, L + 1), L + 3)
    assert low.batch_size(512) == 128
    assert low.batch_size(64) == 64


def test_the_log_has_llama_cpps_words():
    def lines(**options):
        return list(plan(L, None, ["gpu"], **options).log_lines())

    assert lines() == [
        "offloading 32 repeating layers to GPU",
        "offloading non-repeating layers to GPU",
        "offloading v cache to GPU",
        "offloading k cache to GPU",
        "offloaded 35/35 layers to GPU",
    ]
    assert lines(gpu_layers=0) == ["offloaded 0/35 layers to GPU"]
    assert lines(gpu_layers=34)[-2:] == ["offloading v cache to GPU", "offloaded 34/35 layers to GPU"]
    assert lines(low_vram=True) == [
        "offloading 32 repeating layers to GPU",
        "offloading non-repeating layers to GPU",
        "cannot offload v cache to GPU due to low VRAM option",
        "cannot offload k cache to GPU due to low VRAM option",
        "offloaded 33/35 layers to GPU",
    ]
    assert lines(low_vram=True, gpu_layers=33)[-2:] == [
        "offloading non-repeating layers to GPU",
        "offloaded 33/35 layers to GPU",
    ]
    assert not list(plan(L, None, []).log_lines())


@pytest.mark.parametrize(
    ("options", "devices", "mode", "main"),
    [
        ({}, "abcd", "tensor", "a"),
        (dict(main_gpu=2), "abcd", "tensor", "c"),
        (dict(tensor_split=(2, 2, 2, 2)), "abcd", "tensor", "a"),
        (dict(tensor_split=(0, 1, 0, 1)), "bd", "tensor", "b"),
        (dict(tensor_split=(1, 1)), "ab", "tensor", "a"),  # missing shares are 0
        (dict(tensor_split=(0, 0, 5)), "c", "none", "c"),
        (dict(tensor_split=(3, 1)), "ab", "layer", "a"),
        (dict(tensor_split=(3, 0, 1), main_gpu=2), "ac", "layer", "c"),
        (dict(tensor_split=(1, 1, 0, 0, 0, 0)), "ab", "tensor", "a"),  # zeros beyond the last GPU
        (dict(split_mode="layer"), "abcd", "layer", "a"),
        (dict(split_mode="none"), "a", "none", "a"),
        (dict(split_mode="none", main_gpu=3), "d", "none", "d"),
    ],
)
def test_how_gpus_share(options, devices, mode, main):
    p = plan(L, None, list("abcd"), **options)
    assert ("".join(p.devices), p.mode, p.devices[p.main]) == (devices, mode, main)


@pytest.mark.parametrize(
    ("shares", "gpu_layers", "counts"),
    [((3, 1), "all", [24, 8]), ((3, 1), 20, [15, 5]), ((1, 1, 2), "all", [8, 8, 16]), ((1, 2), 0, [0, 0])],
)
def test_layers_in_proportion(shares, gpu_layers, counts):
    p = plan(L, None, list("abc"), tensor_split=shares, gpu_layers=gpu_layers, split_mode="layer")
    on_gpu = p.layer_devices[L - p.gpu_layers :]
    assert [on_gpu.count(d) for d in range(len(shares))] == counts
    assert list(on_gpu) == sorted(on_gpu)
    assert set(p.layer_devices[: L - p.gpu_layers]) <= {0}


def test_without_a_gpu_there_is_nothing_to_plan():
    p = plan(L, None, [], gpu_layers=3, main_gpu=9)
    assert (p.devices, p.mode, p.units) == ((), "none", (L + 3, L + 3))


SIZES = Sizes(layers=(100,) * L, embedding=50, output=60, k_cache=320, v_cache=320, temporaries=40)


def test_bytes_on_the_gpu():
    def needed(devices="a", **options):
        return plan(L, SIZES, list(devices), **options).device_bytes(SIZES)

    everything = 3200 + 50 + 60 + 640 + 40
    assert needed() == (everything,)
    assert needed(gpu_layers=34) == (everything - 320 + 2 * 10,)  # two layers' keys pass through
    assert needed(low_vram=True) == (everything - 640 + 2 * 20,)
    assert needed(gpu_layers=0) == (50 + 2 * (100 + 20) + 40,)
    assert needed("ab") == ((everything - 40) // 2 + 40,) * 2
    assert needed("ab", split_mode="layer", tensor_split=(3, 1)) == (24 * 120 + 110 + 40, 8 * 120 + 40)


@pytest.mark.parametrize(
    ("free", "units"), [(10**6, 35), (4200, 35), (4199, 34), (3884, 33), (3568, 32), (3510, 30), (2000, 15), (100, 0)]
)
def test_auto_takes_the_most_that_fits(free, units):
    p = plan(L, SIZES, ["a"], gpu_layers="auto", free_memory=[free])
    assert p.units[0] == units
    assert next(p.log_lines()).startswith(f"gpu layers: {units}, ")
    assert units == 0 or p.device_bytes(SIZES)[0] <= 0.95 * free
    if units < L + 3:
        assert plan(L, SIZES, ["a"], gpu_layers=units + 1).device_bytes(SIZES)[0] > 0.95 * free


def test_auto_minds_every_gpu():
    def units(*free, **options):
        return plan(L, SIZES, list("ab"), gpu_layers="auto", free_memory=free, **options).units[0]

    assert units(10**6, 10**6) == 35
    assert units(10**6, 2100) == 34  # halves
    assert units(10**6, 600, split_mode="layer", tensor_split=(3, 1)) < L
    assert plan(L, SIZES, ["a"], gpu_layers="auto").units[0] == 35  # memory not known


SENTENCES = [
    (dict(gpu_layers="-1"), "gpu_layers is '-1'"),
    (dict(gpu_layers=-1), "gpu_layers is -1; it must be 0 or above, 'all' or 'auto'."),
    (dict(gpu_layers=1.5), "gpu_layers is 1.5;"),
    (dict(gpu_layers=True), "gpu_layers is True;"),
    (dict(low_vram=1), "low_vram is 1; it must be True or False."),
    (dict(main_gpu=-1), "main_gpu is -1;"),
    (dict(main_gpu=9), "main_gpu is 9; it must be a number from 0 to 1."),
    (dict(tensor_split=(0, 0)), "tensor_split is 0,0;"),
    (dict(tensor_split=(1, -1)), "tensor_split is 1,-1;"),
    (dict(tensor_split=(1, float("nan"))), "tensor_split is 1,nan;"),
    (dict(tensor_split=(1, float("inf"))), "tensor_split is 1,inf;"),
    (dict(tensor_split=()), "tensor_split is ;"),
    (dict(tensor_split=5), "tensor_split is 5;"),
    (dict(tensor_split=("x",)), r"tensor_split is \('x',\);"),
    (dict(tensor_split=(1,) * 17), "tensor_split has 17 shares; there may be at most 16."),
    (dict(tensor_split=(1, 1, 1)), "tensor_split 1,1,1 has shares for 3 GPUs; there are 2."),
    (dict(tensor_split=(1, 0), main_gpu=1), "main_gpu is 1, which tensor_split 1,0 leaves out; give it a share."),
    (dict(tensor_split=(3, 1), split_mode="tensor"), "tensor_split 3,1 has unequal shares"),
    (dict(split_mode="row"), "split_mode is 'row'; it must be one of tensor, layer, none."),
]


@pytest.mark.parametrize(("options", "sentence"), SENTENCES)
def test_wrong_values_are_one_sentence(options, sentence):
    with pytest.raises(ArgumentError, match=sentence) as error:
        plan(L, None, ["a", "b"], **options)
    assert "\n" not in str(error.value)


def test_a_single_gpu_is_named():
    with pytest.raises(ArgumentError, match=r"main_gpu is 9; it must be 0, the only GPU\."):
        plan(L, None, ["a"], main_gpu=9)


# Texts of options


def test_options_are_read():
    read = Placement.parse(gpu_layers="12", low_vram="1", main_gpu="1", tensor_split="3,1", split_mode="layer")
    assert read == Placement(gpu_layers=12, low_vram=True, main_gpu=1, tensor_split=(3, 1), split_mode="layer")
    assert Placement.parse() == Placement()
    assert Placement.parse(gpu_layers="AUTO", low_vram="off").gpu_layers == "auto"
    assert hash(read) != hash(Placement())
    assert read.named_options() == ["--gpu-layers", "--low-vram", "--main-gpu", "--tensor-split", "--split-mode"]
    assert Placement().named_options() == []


@pytest.mark.parametrize(
    ("text", "shares"), [("3,1", (3, 1)), ("3/1", (3, 1)), ("1", (1,)), ("0.5,0,2", (0.5, 0, 2)), ("1, 2", (1, 2))]
)
def test_shares_are_read(text, shares):
    assert parse_shares(text) == shares


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (dict(tensor_split="1,x"), "--tensor-split is '1,x', in which 'x' is no number; it must be like 3,1."),
        (dict(tensor_split=""), "in which '' is no number"),
        (dict(tensor_split="1,,1"), "in which '' is no number"),
        (dict(tensor_split="0,0"), "tensor_split is 0,0; its shares must be finite"),
        (dict(tensor_split="1,-2"), "tensor_split is 1,-2;"),
        (dict(gpu_layers="many"), "--gpu-layers is 'many'; it must be a whole number from 0 to 2147483647, 'all' or"),
        (dict(gpu_layers="-1"), "--gpu-layers is '?-1'?; it must be"),
        (dict(main_gpu="one"), "--main-gpu is 'one'; it must be a whole number from 0 to 2147483647."),
        (dict(low_vram="perhaps"), "--low-vram is 'perhaps'; it must be 1 or 0."),
        (dict(split_mode="row"), "--split-mode is 'row'; it must be one of tensor, layer, none."),
    ],
)
def test_wrong_texts_are_one_sentence(option, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        Placement.parse(**option)
