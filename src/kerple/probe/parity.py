"""Parity: the differences between two computations of the same tokens, compared with the differences by rounding."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kerple.base.atomic import write
from kerple.base.errors import require
from kerple.base.templates import render_template
from kerple.hf.foreign_errors import foreign_errors
from kerple.hf.position_limit import decoder_layers
from kerple.probe.capture import recorded_outputs
from kerple.probe.layer_checks import measure_layers
from kerple.probe.probe_model import embedded
from kerple.probe.reading import EXTRA, Reading

BAND = 4  # largest difference that rounding explains, as a multiple of the larger rounding error of the two sides
EXACT = 100 * torch.finfo(torch.float64).eps  # largest relative error of the forward pass in fp64
ROWS = 256  # number of positions whose probabilities are compared at once, in fp64
ARRAYS = "tokens and one of log_probs, target_log_probs, or top_ids with top_log_probs"


@dataclass
class Outputs:
    """What one side has computed for T tokens.

    Args:
        log_probs: Log-probabilities of the token after each token, (T, K).
        ids: Their ids (T, K) int64; None if K is the size of the vocabulary. With ids, T may be one less, because the
            last token has no target.
        layers: Output of each layer, (layers, T, D); None if it is not known.
        tokens: The tokens, (T,) int64; None if they are those of the other side.
    """

    log_probs: Tensor
    ids: Tensor | None = None
    layers: Tensor | None = None
    tokens: Tensor | None = None


@dataclass
class Side:
    """One of the two computations.

    Args:
        source: A `transformers.PreTrainedModel` in evaluation mode and fp32, a function or another module from tokens
            (1, T) int64 to logits (1, T, V), or the `Outputs` of another engine.
        name: Name in messages.
        reading: How the model reads the tokens. Functions and other modules ignore it.
        dtype: Dtype to which the weights of the model are cast; fp32 for other sources.
        config: Configuration with which `probe` compares a layer; None for the model's own.

    Raises:
        UserError: If the source is no model of transformers, and the dtype is not fp32.
    """

    source: Any
    name: str
    reading: Reading = field(default_factory=Reading)
    dtype: torch.dtype = torch.float32
    config: Any = None

    def __post_init__(self) -> None:
        expected = "torch.float32 for a source that is no model of transformers; cast it before"
        require(self.is_model or self.dtype == torch.float32, f"{self.name}: dtype", self.dtype, expected)

    @property
    def is_model(self) -> bool:
        """Whether the source is a model of transformers, whose rounding can be measured."""
        return hasattr(getattr(self.source, "config", None), "get_text_config")

    def outputs(self, tokens: Tensor, exact: bool = False) -> Outputs:
        """Return the outputs for tokens (T,) int64; with ``exact``, those of the same forward pass in fp64."""
        if isinstance(self.source, Outputs):
            return self.source
        source, layers = self.source, nn.ModuleList()
        if self.is_model:
            expected = "evaluation mode without dropout; use model.eval()"
            require(not source.training, self.name, "a model in training mode", expected)
            source = deepcopy(source) if exact or self.dtype != torch.float32 else source
            layers = decoder_layers(source)
            if exact:
                source.double().config._experts_implementation = "eager"  # the others do not support fp64
            elif self.dtype != torch.float32:
                from kerple.hf.modeling import cast_parameters  # imports transformers, which may not be installed

                cast_parameters(source, self.dtype)
            self.reading.check(source)  # before outputs are recorded, because it may run layers
        elif isinstance(source, nn.Module):  # the layers of a port are its first list of modules
            layers = next((module for module in source.modules() if isinstance(module, nn.ModuleList)), layers)
        rows = tokens[None]
        with recorded_outputs(layers) as hidden, torch.inference_mode(), InFp64() if exact else nullcontext():
            logits = self.reading.logits(source, rows.to(source.device)) if self.is_model else source(rows)
        first = EXTRA if self.is_model and (self.reading.packed or self.reading.padding == "left") else 0
        found = [torch.cat(parts, 1) for parts in hidden.values() if parts and parts[0].ndim == 3]
        states = [state[0, first : first + len(tokens)].cpu() for state in found]
        complete = len(states) == len(hidden) and len({state.shape for state in states}) == 1
        return Outputs(_log_probs(logits, self.name, len(tokens)), layers=torch.stack(states) if complete else None)


class InFp64(TorchFunctionMode):
    """Context in which code that casts to fp32, such as norms and softmaxes of transformers, casts to fp64."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return (Tensor.double if function is Tensor.float else function)(*args, **kwargs)


@dataclass
class Parity:
    """Differences between two sides A and B by position and by layer, each with the band that rounding explains.

    Args:
        names: Names of the sides.
        difference: Largest absolute difference of the compared log-probabilities at each position, (T,) fp64.
        band: Largest difference that rounding explains, (T,).
        kl: KL divergence of B from A at each position in nats, (T,); None unless both sides have all log-probabilities.
        kl_band: The divergence that rounding explains, (T,), 16 times the larger divergence from fp64, because it grows
            with the square of a difference.
        layers: Norm of the difference of the outputs of each layer at each position, (layers, T); None if a side has
            no outputs of layers, or outputs of other shapes.
        layer_band: The same by rounding, (layers, T).
        words: What `probe` finds in the first layer that leaves its band, one line for each model.
        sources: Paths or names from which the sides were read, see `kerple.base.run_folder.report_directory`.
    """

    names: tuple[str, str]
    difference: Tensor
    band: Tensor
    kl: Tensor | None
    kl_band: Tensor | None
    layers: Tensor | None
    layer_band: Tensor | None
    words: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    @property
    def first_position(self) -> int | None:
        """The first position whose difference leaves the band; None if rounding explains all differences."""
        return next(iter((self.difference > self.band).nonzero().flatten().tolist()), None)

    @property
    def layer_ratios(self) -> list[float]:
        """The 99th percentile of difference / band over the positions of each layer. Above 1, the layer leaves it."""
        if self.layers is None or self.layer_band is None:
            return []
        ratios = self.layers / self.layer_band.clamp(min=1e-100)  # a smaller number could give an infinite ratio
        return ratios.quantile(0.99, 1).tolist()

    @property
    def first_layer(self) -> int | None:
        """The first layer that leaves its band."""
        return next((i for i, ratio in enumerate(self.layer_ratios) if ratio > 1), None)

    @property
    def differs(self) -> bool:
        """Whether a position or a layer leaves its band."""
        return self.first_position is not None or self.first_layer is not None

    def summary(self) -> str:
        """Return the report as text for the terminal."""
        worst = int((self.difference / self.band.clamp(min=1e-300)).argmax())
        number = f"{float(self.difference[worst]):.3g}, band {float(self.band[worst]):.2g}, at position {worst}"
        lines = [f"{self.names[0]} against {self.names[1]}, {len(self.difference)} positions"]
        lines += [f"log-probabilities: largest difference relative to the band {number}"]
        if self.kl is not None:
            lines += [f"KL divergence: mean {float(self.kl.mean()):.3g} nats, largest {float(self.kl.max()):.3g} nats"]
        lines += [f"first position outside the band: {self.first_position}"] if self.first_position is not None else []
        layer = "no layer" if self.first_layer is None else f"layer {self.first_layer}"
        compared = [f"first layer outside the band: {layer}"] if self.differs else []
        lines += ["layers were not compared"] if self.layers is None else compared
        return "\n".join([*lines, *self.words, "differs" if self.differs else "equal within rounding"])

    def write(self, folder: Path) -> None:
        """Write ``parity.html`` and ``parity.json`` into a folder."""
        page = render_template("kerple.probe", "parity.html.jinja", parity=self, figure=embedded(self.figure()))
        write(folder / "parity.html", page)
        content = {"names": self.names, "sources": self.sources, "differs": self.differs, "words": self.words}
        content |= {"first_position": self.first_position, "first_layer": self.first_layer}
        content |= {"difference": self.difference.tolist(), "band": self.band.tolist()}
        content |= {"kl": None if self.kl is None else self.kl.tolist(), "layer_ratios": self.layer_ratios}
        write(folder / "parity.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def figure(self) -> Figure:
        """Return the figure of the page: differences and KL divergence by position, and ratios by layer, if known."""
        ratios = self.layer_ratios
        count = 1 + (self.kl is not None) + bool(ratios)
        figure = Figure((10, 3 * count), layout="constrained")
        panels = iter(figure.subplots(count, 1, squeeze=False).flat)
        places = np.arange(len(self.difference))
        tiny = 1e-12  # differences of 0 are drawn here
        position = next(panels)
        position.plot(places, self.difference.clamp(min=tiny), ".", ms=3, label="difference")
        position.plot(places, self.band.clamp(min=tiny), color="#555", lw=1, label="band of rounding")
        position.set(yscale="log", xlabel="position", ylabel="largest difference\nof log-probabilities")
        position.legend()
        if self.kl is not None and self.kl_band is not None:
            divergence = next(panels)
            divergence.plot(places, self.kl.clamp(min=tiny), ".", ms=3, color="#009E73")
            divergence.plot(places, self.kl_band.clamp(min=tiny), color="#555", lw=1)
            divergence.set(yscale="log", xlabel="position", ylabel="KL divergence (nats)")
        if ratios:
            layer = next(panels)
            colors = ["#D55E00" if ratio > 1 else "#0072B2" for ratio in ratios]
            layer.scatter(range(len(ratios)), np.maximum(ratios, 1e-4), 18, colors)
            layer.axhline(1, color="#555", lw=1)
            layer.xaxis.get_major_locator().set_params(integer=True)
            layer.set(yscale="log", xlabel="layer", ylabel="99th percentile of\ndifference / band")
        return figure


def parity(a: Side, b: Side, tokens: Tensor) -> Parity:
    """Compare two computations of the same tokens.

    The band of a position or layer is 4 times the larger difference of A and B from the same forward pass in fp64, or
    the rounding of fp64 if this is larger. If only one side is a model, it is 4 times the difference of this side.

    Args:
        a: The first side.
        b: The second side.
        tokens: The tokens, (T,) int64.

    Raises:
        UserError: If no side is a model, the vocabularies or the numbers of positions differ, an id is outside of the
            vocabulary, a model is in training mode, a side cannot read the tokens, or its log-probabilities are not
            finite.
    """
    sides = (a, b)
    expected = "a model, whose rounding is measured; at most one side may be a file or a function"
    require(a.is_model or b.is_model, a.name, f"no model, as in {b.name}", expected)
    measured = [side.outputs(tokens) for side in sides]
    sizes = [x.log_probs.shape[1] for x in measured if x.ids is None]
    require(len({*sizes}) < 2, b.name, f"a vocabulary of {sizes[-1]} tokens", f"{sizes[0]}, as in {a.name}")
    for side, outputs, other in zip(sides, measured, reversed(sides), strict=True):
        rows, expected = len(outputs.log_probs), f"{len(tokens)}, one for each token"
        valid = rows in (len(tokens), len(tokens) - (outputs.ids is not None))  # the last token has no target
        require(valid, side.name, f"{rows} positions", expected)
        finite = bool(outputs.log_probs.isfinite().all())
        require(finite, side.name, "log-probabilities that are not finite", "finite numbers; check for NaN")
        largest = -1 if outputs.ids is None else int(outputs.ids.max())
        expected = f"ids below {sizes[0]}, the vocabulary of {other.name}"
        require(largest < sizes[0], side.name, f"the id {largest}", expected)
    difference, kl, layers = _differences(*measured)
    bands, kl_bands, layer_bands = [], [], []
    exact: dict[Any, Outputs] = {}  # sides that differ only by their dtype have the same forward pass in fp64
    for side, outputs in zip(sides, measured, strict=True):
        if side.is_model:
            key = id(side.source), side.reading
            if key not in exact:
                exact.clear()  # frees memory
                exact[key] = side.outputs(tokens, exact=True)
            error, divergence, layer_error = _differences(exact[key], outputs)
            kl_bands += [] if divergence is None else [BAND**2 * divergence]
            bands.append(BAND * error[: len(difference)].clamp(min=EXACT * float(outputs.log_probs.abs().max())))
            if layer_error is not None and outputs.layers is not None:
                norms = outputs.layers.double().norm(dim=-1)  # (layers, T)
                layer_bands.append(BAND * layer_error.maximum(EXACT * norms.amax(1, keepdim=True)))
    layer_band = None if layers is None else torch.stack(layer_bands).amax(0)
    kl_band = None if kl is None else torch.stack(kl_bands).amax(0)
    result = Parity((a.name, b.name), difference, torch.stack(bands).amax(0), kl, kl_band, layers, layer_band)
    if (i := result.first_layer) is not None:
        for side in (side for side in sides if side.is_model):
            verdict = measure_layers(side.source, side.config or side.source.config.get_text_config())[i]
            found = "; ".join(filter(None, [verdict.measured, *verdict.differences, verdict.unknown]))
            result.words.append(f"probe of layer {i} of {side.name}: {verdict.verdict}, {found}")
    return result


def read_outputs(path: str, name: str) -> Outputs:
    """Read the outputs of another engine from an .npz file.

    The file has ``tokens`` (T,) and one of ``log_probs`` (T, V), ``target_log_probs`` (T - 1,), and ``top_ids`` with
    ``top_log_probs`` (T, k). Row t belongs to the token after token t.

    Args:
        path: The file.
        name: Name of the side in messages.

    Raises:
        UserError: If the file cannot be read, lacks an array, or an array has another shape or a value that is not
            finite.
    """
    failure, advice = f"{name}: {path} could not be read", f"expected an .npz file with {ARRAYS}"
    with foreign_errors(failure, advice), np.load(path, allow_pickle=False) as file:
        arrays = {key: np.asarray(file[key]) for key in file.files}  # a member that is not an array is read as bytes
    kinds = [key for key in ("log_probs", "target_log_probs", "top_log_probs") if key in arrays]
    valid = "tokens" in arrays and len(kinds) == 1 and ("top_ids" in arrays) == (kinds == ["top_log_probs"])
    require(valid, name, f"a file with {', '.join(sorted(arrays)) or 'no arrays'}", ARRAYS)
    tokens, values, of_targets = arrays["tokens"], arrays[kinds[0]], kinds == ["target_log_probs"]
    valid = tokens.ndim == 1 and len(tokens) > 1 and np.issubdtype(tokens.dtype, np.integer) and tokens.min() >= 0
    given = f"tokens of shape {tokens.shape} and dtype {tokens.dtype}"
    require(valid, name, given, "at least two ids in one dimension")
    given, rows = f"{kinds[0]} of shape {values.shape}", len(tokens) - of_targets
    values = values[:, None] if of_targets and values.ndim == 1 else values
    valid = values.ndim == 2 and len(values) == rows and values.size > 0
    require(valid, name, given, f"{rows} rows, one for each position")
    finite = np.issubdtype(values.dtype, np.floating) and bool(np.isfinite(values).all())
    require(finite, name, f"{kinds[0]} that are not finite numbers", "finite log-probabilities; check them for NaN")
    ids = tokens[1:, None] if of_targets else arrays.get("top_ids")
    valid = ids is None or (ids.shape == values.shape and np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0)
    require(valid, name, "top_ids of another shape or dtype than top_log_probs", "one id for each log-probability")
    int64_ids = None if ids is None else torch.from_numpy(ids.astype(np.int64))
    return Outputs(torch.from_numpy(values), int64_ids, tokens=torch.from_numpy(tokens.astype(np.int64)))


def _log_probs(logits: Tensor, name: str, length: int) -> Tensor:
    """Return log-probabilities (T, V) on the CPU from logits (1, T, V), in fp32 or the wider dtype of the logits."""
    expected = f"finite logits of shape (1, {length}, V)"
    require(isinstance(logits, Tensor), name, f"a {type(logits).__name__}", expected)
    valid = logits.ndim == 3 and logits.shape[:2] == (1, length)
    require(valid, name, f"logits of shape {tuple(logits.shape)}", expected)
    require(bool(logits.isfinite().all()), name, "logits that are not finite", f"{expected}; check the weights for NaN")
    return logits[0].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).cpu()


def _differences(a: Outputs, b: Outputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the difference by position, the KL divergence, and the difference by layer and position; see `Parity`."""
    ids = a.ids if b.ids is None else b.ids
    difference, kl = [], []
    for rows in torch.arange(min(len(a.log_probs), len(b.log_probs))).split(ROWS):
        x, y = (side.log_probs[rows].double() for side in (a, b))
        if ids is not None:
            x, y = (z if side.ids is not None else z.gather(1, ids[rows]) for z, side in ((x, a), (y, b)))
        difference.append((x - y).abs().amax(1))
        x, y = x.log_softmax(1), y.log_softmax(1)  # their sums differ from 1 by the rounding of fp32
        kl.append((x.exp() * (x - y)).sum(1).clamp(min=0))
    layers = None
    if a.layers is not None and b.layers is not None and a.layers.shape == b.layers.shape:
        layers = torch.stack([(x.double() - y.double()).norm(dim=-1) for x, y in zip(a.layers, b.layers, strict=True)])
    return torch.cat(difference), None if ids is not None else torch.cat(kl), layers
