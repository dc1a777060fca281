"""AQUA-KV's calibration: predictors of a layer's keys and values from those of the layer below.

Shutova et al., *Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models*
(2025), sections 3.1 to 3.3, algorithm 1; ``methods/aqua/learned.py`` has the options and
the tensors. A predictor is a ridge regression in closed form, in fp64. Its weights are rounded to
bf16; then the bias is computed so that the rounded predictor has zero mean error, because keys can
have offsets far beyond their spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from hf_kvret.lab.calibrate.study import Calibration, Carried, LayerFindings, LayerStudy, Progress
from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope
from hf_kvret.methods.aqua.learned import NOT_CODED, PredictorOptions, default_group, make_codec
from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_model_patches.rope import Rope

BLOCK = 8192
"""Rows on the device at a time."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs and targets of a predictor, a row for each token; read in blocks, fp32 on a device.

    Attributes:
        inputs: tensors ``[n, *]`` that stand side by side, any float dtype, on the CPU.
        targets: ``[n, out]``.
        device: where blocks go.
    """

    inputs: Sequence[torch.Tensor]
    targets: torch.Tensor
    device: torch.device

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """``(slice, inputs [m, in], targets [m, out])`` of all rows in order."""
        for start in range(0, len(self.targets), BLOCK):
            block = slice(start, min(start + BLOCK, len(self.targets)))
            y = self.targets[block].to(self.device).float()
            inputs = [x[block].to(self.device).float() for x in self.inputs]
            yield block, torch.cat(inputs, dim=1) if inputs else y[:, :0], y


def fit_linear(rows: Rows, *, ridge: float) -> dict[str, torch.Tensor]:
    """``weight`` bf16 and ``bias`` fp32 by ridge regression, on the CPU; the bias is not shrunk.

    Args:
        rows: what to learn from.
        ridge: in units of the mean variance of an input, more than 0.

    Raises:
        ValueError: inputs that are not finite, or go together too closely for the ridge.
    """
    input_mean, target_mean, gram, cross = _moments(rows)
    size = gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    gram = gram + (ridge * size) * torch.eye(len(gram)).to(gram)
    factor, info = torch.linalg.cholesky_ex(gram)
    if info or not gram.isfinite().all():
        raise ValueError(
            "a predictor's inputs have NaN or infinity, or go together too closely for this ridge: "
            "load the model in bfloat16 or float32, or give a larger ridge (1e-3 is usual)"
        )
    weight = torch.cholesky_solve(cross, factor).mT.bfloat16()
    bias = target_mean - weight.double() @ input_mean
    return {"weight": weight.cpu().contiguous(), "bias": bias.float().cpu()}


def _moments(rows: Rows) -> tuple[torch.Tensor, ...]:
    """Means ``[in]`` of inputs and ``[out]`` of targets, then covariances, all in fp64.

    Those are ``[in, in]`` of inputs, and ``[in, out]`` of inputs with targets.
    """
    inputs, outputs = sum(x.shape[1] for x in rows.inputs), rows.targets.shape[1]
    shapes = ((inputs,), (outputs,), (inputs, inputs), (inputs, outputs))
    sums = [torch.zeros(n, dtype=torch.float64, device=rows.device) for n in shapes]
    for _, x, y in rows.blocks():
        x, y = x.double(), y.double()
        terms = x.sum(0), y.sum(0), x.mT @ x, x.mT @ y
        for total, term in zip(sums, terms, strict=True):
            total += term
    input_mean, target_mean, gram, cross = (total / len(rows.targets) for total in sums)
    gram = gram - torch.outer(input_mean, input_mean)
    return input_mean, target_mean, gram, cross - torch.outer(input_mean, target_mean)


def predict(tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The prediction for inputs: ``[..., out]`` fp32.

    Args:
        tensors: of one predictor, ``weight`` and ``bias``, or ``bias`` alone; on the device of
            ``x``.
        x: ``[..., in]`` any float dtype.
    """
    if "weight" not in tensors:
        return tensors["bias"].expand(*x.shape[:-1], -1)
    return F.linear(x.float(), tensors["weight"].float(), tensors["bias"])


ANCHOR_LIMIT = 0.1075
"""Most error of keys or values, in units of their variance, that 4 bits may leave in an anchor.

It is what 2 bits leave of Gaussian rows without an offset. The paper finds a first layer in 2 bits
nearly harmless on Llama (perplexity 7.05 against 7.03, table 1). Where rows have offsets far beyond
their spread 4 bits leave more than this, because the codec's error grows with the whole row; the
paper keeps the first layer of Qwen2.5 as it is (tables 9 and 10).
"""


@dataclass(frozen=True)
class AquaCalibration(PredictorOptions, Calibration):
    """Learns predictors for each layer. Arguments and errors are those of ``PredictorOptions``."""

    method: ClassVar[str] = "aqua"

    def check(self, lengths: Sequence[int]) -> None:
        super().check(lengths)
        if max(lengths) <= self.sinks:
            raise ValueError(
                f"sinks={self.sinks} of sequences of at most {max(lengths)} tokens: no tokens to "
                "learn from beyond them; give fewer --sinks, or a greater --length"
            )

    def group_of(self, layer: int, name: str, width: int) -> int:
        """The group of a layer with ``width`` elements of ``name`` a token.

        Raises:
            ValueError: ``group`` doesn't go with the width.
        """
        group = self.group or default_group(width)
        if width % group:
            raise ValueError(
                f"group={group} does not divide the {width} numbers of {name}s that layer {layer} "
                "has a token: leave --group out, or give a power of two that does"
            )
        return group

    def study(self, layer: int, rope: Rope, device: torch.device) -> AquaStudy:
        return AquaStudy(self, layer, rope, device)

    def options(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(eq=False)
class _Coded:
    """Keys or values of all tokens of a layer.

    ``exact [N, W]`` are those of the model, on the CPU; the first ``train_len`` are learned from.
    """

    name: str
    exact: torch.Tensor
    train_len: int
    group: int


class AquaStudy(LayerStudy):
    """Collects keys and values; learns from them and from the reconstructions of the layer below.

    ``PredictorOptions`` describes the findings. Carried to the next layer are ``key`` and
    ``value`` ``[N, W]``, the reconstructions in the model's dtype, and ``layer``, its number.
    """

    def __init__(
        self, options: AquaCalibration, layer: int, rope: Rope, device: torch.device
    ) -> None:
        self.options, self.layer, self.rope, self.device = options, layer, rope, device
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._groups: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._count = self._train_len = 0

    @property
    def work(self) -> int:
        return len(self._rows) * 2 * self._count

    def add(self, tokens: LayerTokens, held_out: bool) -> None:
        is_before = self.options.space == "before"
        keys = before_rope(tokens.key, self.rope) if is_before else tokens.key
        for name, x in coded_tensors(keys, tokens):
            if name not in self._shapes:
                self._rows[name] = []
                self._shapes[name] = x.shape[1], x.shape[3]
                width = x.shape[1] * x.shape[3]
                self._groups[name] = self.options.group_of(self.layer, name, width)
            rows = x[0, :, self.options.sinks :].transpose(0, 1).flatten(1)
            # Rows may be a view of something larger, so they are copied on the CPU too.
            self._rows[name].append(rows.to("cpu", copy=True))
        assert held_out or self._count == self._train_len, "what is held out comes last"
        count = len(self._rows["key"][-1])
        self._count += count
        self._train_len += 0 if held_out else count

    def finish(self, progress: Progress, carried: Carried | None = None) -> LayerFindings:
        if not self._train_len:
            raise ValueError(
                f"no tokens to learn from beyond the first {self.options.sinks} of each sequence: "
                "give longer sequences"
            )
        assert carried is None or len(carried["key"]) == self._count, "another corpus"
        both = [
            _Coded(name, torch.cat(self._rows.pop(name)), self._train_len, self._groups[name])
            for name in sorted(self._rows)
        ]
        means = {coded.name: self._mean(coded) for coded in both} if carried is None else {}
        bits = self._anchor_bits(both, means) if carried is None else self.options.bits
        tensors = {"inv_freq": self.rope.inv_freq.cpu()}
        tallies: dict[str, Tally] = {}
        reconstructions: dict[str, torch.Tensor] = {}
        for coded in both:
            if carried is None:
                inputs, predictor = [], means[coded.name]
            else:
                inputs = [carried["key"]]
                if coded.name == "value":
                    inputs = [reconstructions["key"], carried["value"]]
                rows = self._train_rows(coded, inputs)
                predictor = fit_linear(rows, ridge=self.options.ridge)
            progress(len(coded.exact))
            tensors |= {f"{coded.name}.{name}": x for name, x in predictor.items()}
            tallies[coded.name] = Tally()
            reconstructions[coded.name] = self._restore(
                coded, inputs, predictor, bits, tallies[coded.name], progress
            )
        role = "anchor" if carried is None else "predicted"
        settings = {
            **self.rope.settings,
            "role": role,
            "previous": None if carried is None else int(carried["layer"]),
            "bits": bits,
            "group": self._groups["key"],
            "value_group": self._groups.get("value"),
            "heads": self._shapes["key"][0],
            "head_dim": self._shapes["key"][1],
            "value_head_dim": self._shapes["value"][1] if "value" in self._shapes else 0,
        }
        quality = {"role": role, "bits": bits, **_figures(tallies, carried is None)}
        number = {"layer": torch.tensor(self.layer)}
        return LayerFindings(tensors, settings, quality, {**reconstructions, **number})

    def _train_rows(self, coded: _Coded, inputs: Sequence[torch.Tensor] = ()) -> Rows:
        """The rows that are learned from."""
        train = slice(coded.train_len)
        return Rows([x[train] for x in inputs], coded.exact[train], self.device)

    def _restore(
        self,
        coded: _Coded,
        inputs: list[torch.Tensor],
        tensors: dict[str, torch.Tensor],
        bits: int,
        tally: Tally,
        progress: Progress,
    ) -> torch.Tensor:
        """Reconstructions of all rows; held-out ones are tallied, also without a predictor."""
        codec = make_codec(bits, coded.group, self.options.seed, self.device)
        predictor = {name: x.to(self.device) for name, x in tensors.items()}
        result = torch.empty_like(coded.exact)
        for block, block_inputs, exact in Rows(inputs, coded.exact, self.device).blocks():
            prediction = predict(predictor, block_inputs) if tensors else torch.zeros_like(exact)
            near = (recode(exact - prediction, codec) + prediction).to(result.dtype)
            result[block] = near.cpu()
            # Figures of quality are of rows that nothing was learned from.
            if (first := max(0, coded.train_len - block.start)) < len(exact):
                tally.add("exact", exact[first:])
                tally.add("unpredicted", (exact - prediction)[first:])
                tally.add("missed", (exact - near.float())[first:])
                tally.add("plain", exact[first:] - recode(exact[first:], codec))
            progress(len(exact))
        return result

    def _mean(self, coded: _Coded) -> dict[str, torch.Tensor]:
        """The prediction of an anchor: its mean if the options say so, else nothing."""
        if not self.options.anchor_mean:
            return {}
        sums = [exact.double().sum(0) for _, _, exact in self._train_rows(coded).blocks()]
        return {"bias": (torch.stack(sums).sum(0) / coded.train_len).float().cpu()}

    def _anchor_bits(self, both: list[_Coded], means: dict[str, dict[str, torch.Tensor]]) -> int:
        """From the options, or chosen by the error of 4 bits on the training rows."""
        first = self.options.first_bits
        if isinstance(first, int):
            return first
        for coded in both:
            tally = Tally()
            codec = make_codec(4, coded.group, self.options.seed, self.device)
            mean = means[coded.name].get("bias", torch.zeros(())).to(self.device)
            for _, _, exact in self._train_rows(coded).blocks():
                tally.add("exact", exact)
                tally.add("missed", exact - mean - recode(exact - mean, codec))
            if (tally.share("missed", "exact") or 0.0) > ANCHOR_LIMIT:
                return NOT_CODED
        return 4


def recode(x: torch.Tensor, codec: HiggsCodec | None) -> torch.Tensor:
    """Rows ``[n, W]`` encoded and decoded again, fp32; ``x`` itself without a codec."""
    if codec is None:
        return x
    pair = codec.encode(x)
    return codec.decode(pair.codes, pair.scales, torch.float32)


class Tally:
    """Sums and squares of rows by name, for shares of variance; fp64."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add rows ``[n, W]``."""
        x = x.double()
        count, total, squares = self._sums.get(name, (0, 0.0, 0.0))
        self._sums[name] = (count + len(x), total + x.sum(0), squares + x.square().sum(0))

    def share(self, name: str, of: str, *, centred: bool = False) -> float | None:
        """The mean square of ``name``, or its variance, over the variance of ``of``.

        None if no rows were added, or if they don't vary.
        """
        if name not in self._sums:
            return None
        count, total, squares = self._sums[name]
        square = squares / count - (total / count).square() if centred else squares / count
        count, total, squares = self._sums[of]
        whole = squares / count - (total / count).square()
        share = float(square.sum() / whole.sum())
        return share if math.isfinite(share) else None


def coded_tensors(keys: torch.Tensor, tokens: LayerTokens) -> list[tuple[str, torch.Tensor]]:
    """The ``"key"`` and ``"value"`` of tokens that are coded; latents have values in their keys."""
    tensors = [("key", keys), ("value", tokens.value)]
    return tensors if tokens.latent is None else tensors[:1]


def _figures(tallies: dict[str, Tally], anchor: bool) -> dict[str, float | None]:
    """Shares of the variance of held-out keys and values, by column name of the quality table."""
    figures: dict[str, float | None] = {}
    for name, tally in tallies.items():
        share = None if anchor else tally.share("unpredicted", "exact", centred=True)
        figures[f"{name}_explained"] = None if share is None else 1.0 - share
    for figure, row in (("error", "missed"), ("error_unpredicted", "plain")):
        for name, tally in tallies.items():
            figures[f"{name}_{figure}"] = tally.share(row, "exact")
    return figures
