"""A trained network as a frozen feature extractor from raw input to features."""

import hashlib
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ksm_lightning.files import draft_of
from ksm_lightning.hub import Pretrained
from ksm_lightning.kernels import Kernel, kernel_name, make_kernel
from ksm_lightning.network import KSMNetwork
from ksm_lightning.network.preprocessing import Frozen, Preprocessing
from ksm_lightning.network.raw_input import as_tensor, check_finite, input_batches, is_finite
from ksm_lightning.network.readout import LandmarkFeatures, Readout, check_readout, needs_sample
from ksm_lightning.runs.checkpoint import network_of, preprocessing_of, read_checkpoint

if TYPE_CHECKING:
    from ksm_lightning.sklearn import FrozenTransformer

FORMAT = 1  # of saved extractors, raised whenever older files would be misread
# Part of the largest feature by which float32 may change a feature.
_ROUNDING = 3e-6


class FeatureExtractor(Pretrained, Frozen):
    """Frozen ``nn.Module`` that computes features ``f(x, W) M`` of raw input x, for example in ``nn.Sequential``.

    It takes the same raw input as the datamodule of the training, in any floating-point or integer dtype; images keep
    their shape. Centring, scaling and cropping are included. Features have the dtype of the input, or float32 for
    integers. The computation is in float32 if that is exact to a few parts in a million, otherwise in float64,
    whatever the precision of the surrounding model. Gradients flow to the input. There are no trainable parameters.

    Args:
        kernel: The similarity.
        W: Landmarks (p, m), in the dtype of the computation.
        M: Readout (p, k), in the same dtype.
        preprocessing: Preprocessing of raw input. Default: none.
        readout: Name of the readout that M belongs to.

    Attributes:
        preprocessing: Maps raw input to standardised points (batch, m).
        features: Maps standardised points to features (batch, k), in the dtype of the computation.

    Example:
        >>> from ksm_lightning import GaussianKernel, KSMNetwork
        >>> network = KSMNetwork(GaussianKernel(), in_features=4, num_neurons=8)
        >>> extractor = FeatureExtractor.from_network(network, readout="nystroem")
        >>> model = torch.nn.Sequential(extractor, torch.nn.Linear(extractor.out_features, 3))
        >>> model(torch.zeros(5, 2, 2)).shape  # image-shaped input is flattened
        torch.Size([5, 3])
    """

    def __init__(
        self,
        kernel: Kernel,
        W: Tensor,
        M: Tensor,
        preprocessing: Preprocessing | None = None,
        readout: Readout = "neural",
    ) -> None:
        super().__init__()
        # Contiguous copies: the memory layout would change the last digits, and files do not store it.
        W, M = (tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (W, M))
        self.features = LandmarkFeatures(kernel, W, M)
        if preprocessing is not None and preprocessing.in_features != W.shape[1]:
            raise ValueError(
                f"The preprocessing has {preprocessing.in_features} features, but the landmarks have {W.shape[1]}."
            )
        prepare = Preprocessing.identity(W.shape[1]) if preprocessing is None else preprocessing
        self.preprocessing = prepare.copy_to(W.device)
        self.readout = check_readout(readout)

    # ------------------------------------------------------------------ construction

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        readout: str | None = None,
        *,
        sample: Tensor | np.ndarray | None = None,
        dtype: torch.dtype | None = None,
        num_features: int | None = None,
    ) -> Self:
        """Load the network of a checkpoint, on the CPU. No code from the file is executed.

        Args:
            path: A ``.ckpt`` file written by ``ksm fit`` or a Trainer, or a run folder, for its last checkpoint.
            readout: ``neural`` (the network's own representation), ``nystroem`` or ``least_squares``. Default:
                ``least_squares``, which has the lowest kernel error, if a sample is given, otherwise ``neural``.
            sample: Sample of raw input, distributed like the training data, for ``least_squares``, and for
                ``nystroem`` with fewer features than landmarks. Otherwise it is ignored.
            dtype: Dtype of the computation, float32 or float64. Default: float32 if it is exact enough.
            num_features: Number of features k, at most the number of landmarks: the top k principal directions on the
                sample. Default: the number of neurons, which ``neural`` always has.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is not a checkpoint, the sample is missing, or the readout cannot have
                ``num_features`` features.
        """
        content = read_checkpoint(path)
        made = cls.from_network(
            network_of(content), readout, sample=sample, preprocessing=preprocessing_of(content), dtype=dtype,
            num_features=num_features,
        )  # fmt: skip
        made.remember(content, path)
        return made

    @classmethod
    @torch.no_grad()
    def from_network(
        cls,
        network: KSMNetwork,
        readout: str | None = None,
        *,
        sample: Tensor | np.ndarray | None = None,
        preprocessing: Preprocessing | None = None,
        dtype: torch.dtype | None = None,
        num_features: int | None = None,
    ) -> Self:
        """Make an extractor from a network, on its device. Arguments as in :meth:`from_checkpoint`."""
        name = check_readout(("neural" if sample is None else "least_squares") if readout is None else readout)
        is_fitted = needs_sample(network, name, num_features)
        if dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"An extractor computes in float32 or float64, got {dtype}.")
        if not all(bool(weights.isfinite().all()) for weights in network.parameters()):
            raise ValueError("The network has weights that are not finite: it diverged, use an older checkpoint.")
        prepare = Preprocessing.identity(network.in_features) if preprocessing is None else preprocessing
        x = None
        if is_fitted:
            if sample is None:
                how = "" if name == "least_squares" else " with fewer features than landmarks"
                raise ValueError(f"The readout {name}{how} is fitted to data: pass a `sample` of raw input.")
            raw = check_finite(as_tensor(sample), "The sample").to(network.W.device)
            x = prepare.copy_to(network.W.device)(raw)
        features = LandmarkFeatures.of(network, name, x, num_features=num_features)
        if not bool(features.M.isfinite().all()):
            raise ValueError(f"The network has no {name} readout: its weights diverged, use an older checkpoint.")
        dtype = sufficient_dtype(features) if dtype is None else dtype
        return cls(network.kernel, features.W.to(dtype), features.M.to(dtype), prepare, name)

    # ------------------------------------------------------------------ features

    @property
    def kernel(self) -> Kernel:
        """The similarity."""
        return self.features.kernel

    @property
    def W(self) -> Tensor:
        """Landmarks (p, m)."""
        return self.features.W

    @property
    def M(self) -> Tensor:
        """Readout (p, k)."""
        return self.features.M

    @property
    def in_features(self) -> int:
        """Number of input features m, after cropping."""
        return self.W.shape[1]

    @property
    def out_features(self) -> int:
        """Number of features k."""
        return self.M.shape[1]

    @property
    def raw_features(self) -> int:
        """Number of values per point of raw input, before cropping."""
        return math.prod(self.preprocessing.raw_shape or (self.in_features,))

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self.W.device

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, k) of raw input (batch, ...) in any shape with m values per point."""
        return self.features(self.preprocessing(x)).to(x.dtype if x.is_floating_point() else torch.float32)

    @torch.no_grad()
    def transform(self, data: Any, batch_size: int = 4096, *, show_progress: bool = False) -> Any:
        """Features of any amount of data, computed in batches on the device of the extractor.

        Args:
            data: An array, a tensor or a data frame with one point per row; or a loader whose batches are tensors, or
                tuples that start with a tensor.
            batch_size: Number of points per batch. Ignored for a loader.
            show_progress: Whether to show a progress bar.

        Returns:
            An array for an array or a data frame, a tensor on the same device for a tensor, and a tensor on the CPU
            for a loader.

        Raises:
            ValueError: If the data is empty, has the wrong number of features, or contains NaN or infinity.
        """
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        is_array = not isinstance(data, Tensor) and hasattr(data, "__array__")
        out_device = data.device if isinstance(data, Tensor) else torch.device("cpu")
        parts = []
        batches, total = input_batches(data, batch_size)
        for batch in tqdm(batches, total=total, desc="Features", unit="batch", disable=not show_progress):
            x = check_finite(as_tensor(batch), "The input").to(self.device)
            features = self(x).to(out_device)
            if not is_finite(features):
                raise ValueError(
                    f"Features are out of the range of {features.dtype}: scale the input like the training data."
                )
            parts.append(features)
        if not parts or not sum(map(len, parts)):
            raise ValueError("The input is empty: pass at least one point.")
        return torch.cat(parts).numpy() if is_array else torch.cat(parts)

    def to_sklearn(self) -> "FrozenTransformer":
        """A scikit-learn transformer with these features. Its ``fit`` and ``clone`` do not change them."""
        from ksm_lightning.sklearn import FrozenTransformer  # importing scikit-learn is slow

        return FrozenTransformer(self)

    # ------------------------------------------------------------------ files

    @property
    def metadata(self) -> dict[str, Any]:
        """Description of the extractor as plain values."""
        shape = self.preprocessing.image_shape
        return {
            "format": FORMAT,
            "kernel": kernel_name(self.kernel),
            "kernel_params": self.kernel.params(),
            "readout": self.readout,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "image_shape": None if shape is None else list(shape),
            "crop": self.preprocessing.crop,
            "version": version("ksm_lightning"),
        }

    @property
    def identity(self) -> str:
        """Hash of 16 hexadecimal digits over kernel, landmarks, readout and preprocessing."""
        digest = hashlib.sha256()
        about = {name: value for name, value in self.metadata.items() if name != "version"}
        digest.update(json.dumps(about, sort_keys=True).encode())
        for name, tensor in self._tensors().items():
            digest.update(f"{name} {tensor.dtype}".encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def description(self) -> dict[str, Any]:
        """Identity and metadata, as stored in files."""
        return {"identity": self.identity, **self.metadata}

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors by their names in files, sorted, on the CPU."""
        prepare = self.preprocessing
        tensors = {"M": self.M, "W": self.W, "preprocessing.mean": prepare.mean, "preprocessing.scale": prepare.scale}
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def save(self, path: str | Path) -> Path:
        """Write the extractor to one ``.safetensors`` file, atomically, and return the path. :meth:`load` reads it."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise ValueError(f"An extractor is saved to a .safetensors file, got {path}.")
        with draft_of(path) as draft:
            draft.write_bytes(self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        """The content of the file that :meth:`save` writes."""
        from safetensors.torch import save

        return save(self._tensors(), metadata={"ksm_lightning": json.dumps(self.description)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load an extractor that :meth:`save` or ``ksm export --format=safetensors`` wrote, on the CPU.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is damaged or has another format, or the kernel is not registered.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"The extractor {path} does not exist.")
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("ksm_lightning", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError, ValueError, RecursionError, RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is damaged or not a safetensors file: {reason}.") from error
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"{path} is not a feature extractor that this version of ksm_lightning can read.")
        try:
            kernel = make_kernel(about["kernel"], **about["kernel_params"])
            state = {name: tensors[f"preprocessing.{name}"] for name in ("mean", "scale")}
            prepare = Preprocessing.from_state({**state, "image_shape": about["image_shape"], "crop": about["crop"]})
            extractor = cls(kernel, tensors["W"], tensors["M"], prepare, about["readout"])
        except KeyError as error:
            raise ValueError(f"The extractor {path} is damaged: {error} is missing.") from error
        except Exception as error:  # damaged values can fail in any way
            raise ValueError(f"The extractor {path} cannot be used: {' '.join(str(error).split())}") from error
        # The version, which wrote the file, is not a part of the identity.
        stored, found = ({**each, "version": ""} for each in (about, extractor.description))
        if stored != found or set(tensors) != set(extractor._tensors()):
            raise ValueError(f"The extractor {path} is damaged: its content does not match its identity.")
        return extractor

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, readout={self.readout!r}, "
            f"dtype={self.W.dtype}"
        )


@torch.no_grad()
def sufficient_dtype(features: LandmarkFeatures) -> torch.dtype:
    """float32 if it changes features by at most a few parts in a million of the largest, otherwise float64.

    The readout M amplifies rounding errors, by up to 1e5 if landmarks are close to each other. The error is largest at
    and near the landmarks, so it is measured there. The given features must be in float64.
    """
    W, M = features.W, features.M
    x = torch.cat([W, 0.99 * W + 0.01 * W.roll(1, 0)])
    exact = features(x)
    rounded = LandmarkFeatures(features.kernel, W.float(), M.float())(x)
    is_close = (exact - rounded.double()).abs().max() <= _ROUNDING * exact.abs().max()
    return torch.float32 if bool(is_close) else torch.float64
