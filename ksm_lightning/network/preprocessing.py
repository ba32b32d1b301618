"""Cropping, centring and scaling of raw input; stored with the network that was trained on the result."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ksm_lightning.kernels.limits import ROWS_AT_ONCE

Scaling = Literal["none", "global", "feature"]


class Frozen(nn.Module):
    """A module whose buffers move between devices but keep their dtype.

    Casting a surrounding model to half precision would cost them accuracy and save almost no memory.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class Preprocessing(Frozen):
    """``x -> (x - mean) / scale``, after raw images are cropped and all input is flattened.

    Args:
        mean: Subtracted from each feature (m,); stored in float64.
        scale: Divides each feature (m,), positive; stored in float64.
        image_shape: Height and width of a point if points are images.
        crop: Number of pixels cropped from each side of raw images.

    Example:
        >>> prepare = Preprocessing(torch.zeros(4), torch.full((4,), 2.0), image_shape=(2, 2), crop=1)
        >>> prepare(torch.ones(3, 1, 4, 4)).shape, prepare(torch.ones(3, 4))[0].tolist()
        (torch.Size([3, 4]), [0.5, 0.5, 0.5, 0.5])
    """

    def __init__(self, mean: Tensor, scale: Tensor, image_shape: tuple[int, int] | None = None, crop: int = 0) -> None:
        super().__init__()
        if mean.dim() != 1 or mean.shape != scale.shape or len(mean) == 0:
            raise ValueError(
                "`mean` and `scale` must have one number per feature, got shapes "
                f"{tuple(mean.shape)} and {tuple(scale.shape)}."
            )
        if image_shape is not None and math.prod(image_shape) != len(mean):
            raise ValueError(f"Images of {image_shape[0]} x {image_shape[1]} pixels do not have {len(mean)} features.")
        if crop < 0 or (crop and image_shape is None):
            raise ValueError(
                f"Only images can be cropped, by 0 or more pixels: got crop={crop} with image_shape={image_shape}."
            )
        self.register_buffer("mean", mean.detach().double().clone())
        self.register_buffer("scale", scale.detach().double().clone())
        self.mean: Tensor
        self.scale: Tensor
        self.image_shape = image_shape
        self.crop = crop
        self._is_identity = False  # set by the classmethods: comparing values here would synchronise with the device

    @classmethod
    def identity(cls, in_features: int, image_shape: tuple[int, int] | None = None, crop: int = 0) -> Self:
        """Preprocessing with mean 0 and scale 1 for points of ``in_features`` features."""
        made = cls(torch.zeros(in_features), torch.ones(in_features), image_shape, crop)
        made._is_identity = True
        return made

    @classmethod
    def measure(
        cls,
        array: np.ndarray,
        *,
        centre: bool,
        scaling: Scaling,
        image_shape: tuple[int, int] | None = None,
        crop: int = 0,
    ) -> Self:
        """Preprocessing with the mean and scale of training data, accumulated in float64 over blocks of rows.

        Args:
            array: Cropped and flattened data (samples, m), possibly memory-mapped.
            centre: Whether to subtract the mean of each feature.
            scaling: Divide by nothing (none), by the standard deviation of all entries (global), or by the standard
                deviation of each feature (feature). The scale of constant data or of a constant feature is 1.
            image_shape: Height and width of a point if points are images.
            crop: Number of pixels cropped from each side of raw images.

        Example:
            >>> Preprocessing.measure(np.array([[0.0, 5.0], [4.0, 5.0]]), centre=True, scaling="feature").scale.tolist()
            [2.0, 1.0]
        """
        if scaling not in get_args(Scaling):
            raise ValueError(f"`scaling` must be one of {', '.join(get_args(Scaling))}, got {scaling!r}.")
        num_features = array.shape[1]
        if not centre and scaling == "none":
            return cls.identity(num_features, image_shape, crop)
        total, square = np.zeros(num_features), np.zeros(num_features)
        # Sums about a first estimate of the mean keep the variance accurate for data far from the origin.
        guess = np.asarray(array[:ROWS_AT_ONCE], dtype=np.float64).mean(0)
        for start in range(0, len(array), ROWS_AT_ONCE):
            rows = np.asarray(array[start : start + ROWS_AT_ONCE], dtype=np.float64) - guess
            total += rows.sum(0)
            square += (rows * rows).sum(0)
        offset = total / len(array)
        mean, variance = guess + offset, square / len(array) - offset**2
        if scaling == "global":
            variance = np.full(num_features, variance.mean() + ((mean - mean.mean()) ** 2).mean())
        # A variance at rounding level belongs to a constant feature, which cannot be scaled to 1.
        has_spread = variance > (8 * np.finfo(np.float64).eps * np.abs(mean)) ** 2
        scale = np.where(has_spread & (scaling != "none"), np.sqrt(np.maximum(variance, 0)), 1.0)
        mean = mean if centre else np.zeros(num_features)
        return cls(torch.from_numpy(mean), torch.from_numpy(scale), image_shape, crop)

    def copy_to(self, device: torch.device | str) -> Self:
        """A copy on ``device``; this module is not moved."""
        made = type(self)(self.mean.to(device), self.scale.to(device), self.image_shape, self.crop)
        made._is_identity = self._is_identity
        return made

    @property
    def in_features(self) -> int:
        """Number of features m of a point."""
        return len(self.mean)

    @property
    def raw_shape(self) -> tuple[int, int] | None:
        """Height and width of images before cropping; None without cropping."""
        if self.image_shape is None or not self.crop:
            return None
        return self.image_shape[0] + 2 * self.crop, self.image_shape[1] + 2 * self.crop

    def flatten(self, x: Tensor) -> Tensor:
        """Rows (batch, m) of a batch of any shape; images of :attr:`raw_shape` are cropped."""
        flat = x.flatten(1) if x.dim() > 1 else x
        raw = self.raw_shape
        if raw is not None and flat.dim() == 2 and flat.shape[1] == math.prod(raw):
            inside = slice(self.crop, -self.crop)
            return flat.view(-1, *raw)[:, inside, inside].flatten(1)
        if flat.dim() != 2 or flat.shape[1] != self.in_features:
            wanted = f"(batch, {self.in_features})"
            if self.image_shape is not None:
                height, width = raw or self.image_shape
                wanted += f" or images of {height} x {width} pixels"
            raise ValueError(f"Inputs must be {wanted}, got the shape {tuple(x.shape)}.")
        return flat

    def forward(self, x: Tensor) -> Tensor:
        """Preprocessed rows (batch, m) in float64; the identity keeps the dtype of ``x``."""
        rows = self.flatten(x)
        if self._is_identity:
            return rows
        rows = rows.byte() if rows.dtype == torch.bool else rows  # PyTorch cannot subtract from booleans
        return (rows - self.mean).div_(self.scale)  # float64, the dtype of mean and scale

    def transform(self, rows: np.ndarray) -> np.ndarray:
        """Preprocessed copy of cropped, flattened rows (samples, m): float64 arithmetic, then cast to float32."""
        if self._is_identity:
            return np.array(rows, dtype=np.float32)
        mean, scale = self.mean.cpu().numpy(), self.scale.cpu().numpy()
        result = np.empty(rows.shape, dtype=np.float32)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            block = slice(start, start + ROWS_AT_ONCE)
            result[block] = (np.asarray(rows[block], dtype=np.float64) - mean) / scale
        return result

    def inverse(self, rows: Tensor) -> Tensor:
        """Raw rows (batch, m), float64, of preprocessed ones; cropped pixels cannot be restored."""
        return rows.double() * self.scale + self.mean

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._is_identity = False  # mean and scale have changed

    def state(self) -> dict[str, Any]:
        """Tensors and plain values for a checkpoint."""
        shape = None if self.image_shape is None else list(self.image_shape)
        return {"mean": self.mean.cpu(), "scale": self.scale.cpu(), "image_shape": shape, "crop": self.crop}

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Preprocessing from the result of :meth:`state`. Raises ValueError if it is incomplete or invalid."""
        is_complete = isinstance(state, Mapping) and set(state) == {"mean", "scale", "image_shape", "crop"}
        if not is_complete or not all(isinstance(state[name], Tensor) for name in ("mean", "scale")):
            raise ValueError("The state of the preprocessing is incomplete.")
        mean, scale, shape, crop = state["mean"], state["scale"], state["image_shape"], state["crop"]
        if not (bool(mean.isfinite().all()) and bool(scale.isfinite().all()) and bool((scale > 0).all())):
            raise ValueError("The preprocessing has a mean that is not finite, or a scale that is not positive.")
        sides = list(shape) if isinstance(shape, list | tuple) else []
        is_shape = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        if not (shape is None or is_shape) or not isinstance(crop, int):
            raise ValueError(f"The preprocessing has an invalid image shape or crop: {shape}, {crop}.")
        made = cls(mean, scale, None if shape is None else (shape[0], shape[1]), crop)
        made._is_identity = not bool(mean.any()) and bool((scale == 1).all())
        return made

    def extra_repr(self) -> str:
        image = "" if self.image_shape is None else f", image_shape={self.image_shape}, crop={self.crop}"
        return f"in_features={self.in_features}{image}"
