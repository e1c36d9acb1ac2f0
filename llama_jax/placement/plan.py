"""What lives where, as a pure function of a request: layers, caches and devices, and what the log says of them.

Units are llama.cpp's. A model of L layers has L + 3 of them: the last N layers go to the GPU first, then the
non-repeating part (last norm and output head), then the cache of values, then that of keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from llama_jax import checks
from llama_jax.errors import ArgumentError

GpuLayers = int | Literal["all", "auto"]
SplitMode = Literal["tensor", "layer", "none"]

SPLIT_MODES = ("tensor", "layer", "none")
MOST_SHARES = 16  # of a tensor split, llama.cpp's limit
LOW_VRAM_BATCH = 128  # prompt tokens in one run of the model with low VRAM
_USABLE = 0.95  # of the free memory, where `auto` decides


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a user asks for: what goes to the GPUs, and how several of them share it.

    Attributes:
      gpu_layers: units on the GPU, 0 ... L + 3 or more; "all"; or "auto", the most that free memory holds. The rest
        stays in host memory and is brought to the GPU layer by layer in each run.
      low_vram: the KV cache stays in host memory, and prompts run in smaller chunks.
      main_gpu: number of the GPU that holds what is not divided; None is the first that has a share.
      tensor_split: shares of the GPUs in order, missing ones 0; None shares evenly. 0 leaves a GPU out.
      split_mode: "tensor" divides every weight evenly; "layer" gives each GPU consecutive layers, as many as its share
        says; "none" uses the main GPU alone. None is "tensor" for equal shares and "layer" for others.
      devices: what counts as GPUs, in order; None is all GPUs that jax finds.

    Raises:
      ArgumentError: a value is wrong by itself or contradicts another.
    """

    gpu_layers: GpuLayers = "all"
    low_vram: bool = False
    main_gpu: int | None = None
    tensor_split: tuple[float, ...] | None = None
    split_mode: SplitMode | None = None
    devices: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        if self.gpu_layers not in ("all", "auto"):
            checks.integer("gpu_layers", self.gpu_layers, 0, allowed="0 or above, 'all' or 'auto'")
        if not isinstance(self.low_vram, bool):
            raise ArgumentError(f"low_vram is {self.low_vram!r}; it must be True or False.")
        if self.main_gpu is not None:
            checks.integer("main_gpu", self.main_gpu, 0)
        if self.split_mode not in (None, *SPLIT_MODES):
            raise ArgumentError(f"split_mode is {self.split_mode!r}; it must be one of {', '.join(SPLIT_MODES)}.")
        if self.tensor_split is not None:
            object.__setattr__(self, "tensor_split", _checked_shares(self.tensor_split))
            self._check_mode()
        if self.devices is not None:
            object.__setattr__(self, "devices", tuple(self.devices))
            if not self.devices:
                raise ArgumentError("devices is empty; name at least one, or None for all GPUs.")

    def _check_mode(self) -> None:
        assert self.tensor_split is not None
        if self.split_mode == "tensor" and len({share for share in self.tensor_split if share}) > 1:
            raise ArgumentError(
                f"tensor_split {_shown(self.tensor_split)} has unequal shares, which split_mode 'tensor' cannot give; "
                "use 'layer' or equal shares."
            )

    @classmethod
    def parse(
        cls,
        *,
        gpu_layers: str | None = None,
        low_vram: str | None = None,
        main_gpu: str | None = None,
        tensor_split: str | None = None,
        split_mode: str | None = None,
    ) -> Placement:
        """From the texts of command-line options or environment variables; None where one is not given."""
        given: dict[str, Any] = {}
        if gpu_layers is not None:
            text = gpu_layers.strip().lower()
            allowed = f"a whole number from 0 to {checks.MOST}, 'all' or 'auto'"
            given["gpu_layers"] = text if text in ("all", "auto") else _whole("--gpu-layers", gpu_layers, allowed)
        if low_vram is not None:
            given["low_vram"] = _flag("--low-vram", low_vram)
        if main_gpu is not None:
            given["main_gpu"] = _whole("--main-gpu", main_gpu, f"a whole number from 0 to {checks.MOST}")
        if tensor_split is not None:
            given["tensor_split"] = parse_shares(tensor_split)
        if split_mode is not None:
            if split_mode not in SPLIT_MODES:
                raise ArgumentError(f"--split-mode is {split_mode!r}; it must be one of {', '.join(SPLIT_MODES)}.")
            given["split_mode"] = split_mode
        return cls(**given)

    def named_options(self) -> list[str]:
        """The command-line names of the options that differ from the defaults."""
        default = Placement()
        names = [field.name for field in dataclasses.fields(self) if field.name != "devices"]
        changed = [name for name in names if getattr(self, name) != getattr(default, name)]
        return ["--" + name.replace("_", "-") for name in changed]


def parse_shares(text: str) -> tuple[float, ...]:
    """The shares in "3,1" or "3/1".

    Raises:
      ArgumentError: one is no number, negative or infinite, all are 0, or there are more than 16.
    """
    parts = text.replace("/", ",").split(",")
    try:
        shares = tuple(float(part) for part in parts)
    except ValueError:
        wrong = next(part for part in parts if not _is_number(part))
        raise ArgumentError(
            f"--tensor-split is {text!r}, in which {wrong!r} is no number; it must be like 3,1."
        ) from None
    return _checked_shares(shares)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _whole(name: str, text: str, allowed: str) -> int:
    try:
        return checks.integer(name, int(text), 0, allowed=allowed)
    except ValueError:
        raise ArgumentError(f"{name} is {text!r}; it must be {allowed}.") from None


def _flag(name: str, text: str) -> bool:
    known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False, "": False}
    if text.strip().lower() not in known:
        raise ArgumentError(f"{name} is {text!r}; it must be 1 or 0.")
    return known[text.strip().lower()]


def _checked_shares(shares: Any) -> tuple[float, ...]:
    try:
        values = tuple(float(share) for share in shares)
    except (TypeError, ValueError):
        raise ArgumentError(f"tensor_split is {shares!r}; it must be numbers, one a GPU, like (3, 1).") from None
    if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
        raise ArgumentError(
            f"tensor_split is {_shown(values)}; its shares must be finite, 0 or above, and one of them above 0."
        )
    if len(values) > MOST_SHARES:
        raise ArgumentError(f"tensor_split has {len(values)} shares; there may be at most {MOST_SHARES}.")
    return values


def _shown(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a model's parts, from which `plan` finds out what fits.

    Attributes:
      layers: of each layer's weights.
      embedding: always on the main GPU, since looking up a row there is cheap and streaming all of it is not.
      output: last norm and output head; the norm alone where the embedding is the head.
      k_cache, v_cache: of all layers.
      temporaries: what a run of the model needs besides, on each device.
    """

    layers: tuple[int, ...]
    embedding: int = 0
    output: int = 0
    k_cache: int = 0
    v_cache: int = 0
    temporaries: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a `Placement` comes to for one model and the devices that are there.

    Attributes:
      devices: in use, in order; with mode "layer" each holds one stretch of layers. Empty: no GPU is there and the
        default device holds everything.
      main: the one of them that holds what is not divided.
      mode: "tensor" or "layer"; "none" where one device is in use.
      n_layers: L.
      gpu_layers: repeating layers on GPUs, the last ones.
      output_on_gpu, v_cache_on_gpu, k_cache_on_gpu: the further units.
      low_vram: as asked for.
      requested: units asked for, at most L + 3; more than there are on the GPU with low VRAM.
      layer_devices: for each layer the place in `devices` of the one that computes it; all 0 but for mode "layer".
      chosen: why `gpu_layers` is what it is, where "auto" chose it.
    """

    devices: tuple[Any, ...]
    main: int
    mode: SplitMode
    n_layers: int
    gpu_layers: int
    output_on_gpu: bool
    v_cache_on_gpu: bool
    k_cache_on_gpu: bool
    low_vram: bool
    requested: int
    layer_devices: tuple[int, ...]
    chosen: str = ""

    @property
    def units(self) -> tuple[int, int]:
        """X and Y of "offloaded X/Y layers to GPU"."""
        extra = self.output_on_gpu + self.v_cache_on_gpu + self.k_cache_on_gpu
        return self.gpu_layers + extra, self.n_layers + 3

    def layer_on_gpu(self, index: int) -> bool:
        """Whether the weights of a layer are on a GPU for good."""
        return index >= self.n_layers - self.gpu_layers

    def batch_size(self, n_batch: int) -> int:
        """Prompt tokens in one run of the model, where the user asked for `n_batch`."""
        return min(n_batch, LOW_VRAM_BATCH) if self.low_vram else n_batch

    def device_bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Bytes that each of `devices` will hold at most, with what is streamed through it and its temporaries."""
        n = len(self.devices)
        held = [0] * n
        share = n if self.mode == "tensor" else 1
        streamed = [0] * n
        k, v = (size // max(1, self.n_layers) for size in (sizes.k_cache, sizes.v_cache))
        for index, (size, device) in enumerate(zip(sizes.layers, self.layer_devices, strict=True)):
            held[device] += size if self.layer_on_gpu(index) else 0
            held[device] += k * self.k_cache_on_gpu + v * self.v_cache_on_gpu
            passing = k * (not self.k_cache_on_gpu) + v * (not self.v_cache_on_gpu)
            passing += size * (not self.layer_on_gpu(index))
            streamed[device] = max(streamed[device], 2 * passing)  # the one that is computed and the next
        held[self.main] += sizes.embedding + sizes.output * self.output_on_gpu
        if not self.output_on_gpu:
            streamed[self.main] = max(streamed[self.main], sizes.output)
        sums = [a + b for a, b in zip(held, streamed, strict=True)]
        if self.mode == "tensor":
            sums = [sum(sums)] * n
        return tuple(-(-total // share) + sizes.temporaries for total in sums)

    def log_lines(self) -> Iterator[str]:
        """What happens, in llama.cpp's words; nothing where no GPU is there."""
        if not self.devices:
            return
        if self.chosen:
            yield self.chosen
        if self.mode == "tensor":
            yield f"dividing every weight over {len(self.devices)} GPUs"
        if self.mode == "layer":
            counts = [self.layer_devices[self.n_layers - self.gpu_layers :].count(i) for i in range(len(self.devices))]
            yield f"layers per GPU: {', '.join(map(str, counts))}"
        if self.gpu_layers:
            yield f"offloading {self.gpu_layers} repeating layers to GPU"
        if self.output_on_gpu:
            yield "offloading non-repeating layers to GPU"
        for extra, name in ((2, "v"), (3, "k")):
            if self.requested < self.n_layers + extra:
                continue
            if not self.low_vram:
                yield f"offloading {name} cache to GPU"
            else:
                yield f"cannot offload {name} cache to GPU due to low VRAM option"
        yield "offloaded {}/{} layers to GPU".format(*self.units)


def plan(
    n_layers: int,
    sizes: Sizes | None,
    devices: Sequence[Any],
    *,
    gpu_layers: GpuLayers = "all",
    low_vram: bool = False,
    main_gpu: int | None = None,
    tensor_split: Sequence[float] | None = None,
    split_mode: SplitMode | None = None,
    free_memory: Sequence[int] | None = None,
) -> Plan:
    """Works out what lives where. Touches no device.

    Args:
      n_layers: L.
      sizes: needed for "auto" alone.
      devices: the GPUs that are there, of any type; none means that everything is on the default device.
      gpu_layers ... split_mode: see `Placement`.
      free_memory: bytes free on each of `devices`; None where it is not known, and "auto" takes all.

    Raises:
      ArgumentError: a value is wrong, or not possible with these devices.
    """
    asked = Placement(
        gpu_layers=gpu_layers,
        low_vram=low_vram,
        main_gpu=main_gpu,
        tensor_split=tensor_split,  # type: ignore[arg-type]
        split_mode=split_mode,
    )
    if not devices:
        return _resolved(n_layers, (), 0, "none", n_layers + 3, False, ())
    used, shares, mode, main = _shared_devices(asked, len(devices))

    def attempt(units: int, chosen: str = "") -> Plan:
        repeating = min(units, n_layers)
        layer_devices = (0,) * n_layers
        if mode == "layer":
            layer_devices = (0,) * (n_layers - repeating) + _by_share(repeating, shares)
        in_use = tuple(devices[i] for i in used)
        return _resolved(n_layers, in_use, used.index(main), mode, units, low_vram, layer_devices, chosen)

    everything = n_layers + 3
    if asked.gpu_layers == "all":
        return attempt(everything)
    if asked.gpu_layers != "auto":
        return attempt(min(asked.gpu_layers, everything))
    if free_memory is None or sizes is None:
        return attempt(everything, "gpu layers: all, since the free memory is not known")
    room = [int(_USABLE * free_memory[i]) for i in used]
    for units in range(everything, -1, -1):
        needed = attempt(units).device_bytes(sizes)
        if units == 0 or all(a <= b for a, b in zip(needed, room, strict=True)):
            n = min(units, n_layers + 1) if low_vram else units
            need, least = max(needed) / 1e9, min(room) / 1e9
            return attempt(units, f"gpu layers: {n}, which need at most {need:.1f} GB on a GPU; free: {least:.1f} GB")
    raise AssertionError("0 units are always taken")


def _resolved(
    n_layers: int,
    devices: tuple[Any, ...],
    main: int,
    mode: SplitMode,
    units: int,
    low_vram: bool,
    layer_devices: tuple[int, ...],
    chosen: str = "",
) -> Plan:
    return Plan(
        devices=devices,
        main=main,
        mode=mode,
        n_layers=n_layers,
        gpu_layers=min(units, n_layers),
        output_on_gpu=units > n_layers,
        v_cache_on_gpu=units > n_layers + 1 and not low_vram,
        k_cache_on_gpu=units > n_layers + 2 and not low_vram,
        low_vram=low_vram,
        requested=units,
        layer_devices=layer_devices or (0,) * n_layers,
        chosen=chosen,
    )


def _shared_devices(asked: Placement, n: int) -> tuple[list[int], list[float], SplitMode, int]:
    """The numbers of the devices in use, their shares, how they share, and the main one."""
    shares = list(asked.tensor_split or (1.0,) * n)
    if any(shares[n:]):
        raise ArgumentError(f"tensor_split {_shown(shares)} has shares for {len(shares)} GPUs; there are {n}.")
    shares = [*shares, *[0.0] * n][:n]
    main = asked.main_gpu
    if main is not None and main >= n:
        allowed = f"a number from 0 to {n - 1}" if n > 1 else "0, the only GPU"
        raise ArgumentError(f"main_gpu is {main}; it must be {allowed}.")
    if asked.split_mode == "none":
        main = main if main is not None else next(i for i, share in enumerate(shares) if share)
        return [main], [1.0], "none", main
    used = [i for i in range(n) if shares[i]]
    main = used[0] if main is None else main
    if main not in used:
        raise ArgumentError(f"main_gpu is {main}, which tensor_split {_shown(shares)} leaves out; give it a share.")
    if len(used) == 1:
        return used, [1.0], "none", main
    equal = len({shares[i] for i in used}) == 1
    mode = asked.split_mode or ("tensor" if equal else "layer")
    return used, [shares[i] for i in used], mode, main


def _by_share(n_layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """For each of `n_layers` the number of its device: consecutive stretches in proportion to the shares."""
    total, cumulative, devices = sum(shares), 0.0, []
    for device, share in enumerate(shares):
        cumulative += share
        last = device == len(shares) - 1
        devices += [device] * ((n_layers if last else math.floor(n_layers * cumulative / total + 1e-9)) - len(devices))
    return tuple(devices)
