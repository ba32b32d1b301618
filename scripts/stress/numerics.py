"""Random fits of `KSMTransformer`: shapes, scales, offsets, distributions, all kernels, bounds and readouts."""

import collections
import re
import traceback
import warnings
from typing import Any

import numpy as np
import torch
from common import Job, run_all, table

from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels import Kernel
from ksm_lightning.network.readout import READOUTS
from ksm_lightning.network.readout_matrices import nystroem_matrix
from ksm_lightning.sklearn import KSMTransformer

FITS = 5000
KERNELS = {
    "gaussian": "sigma", "laplacian": "sigma", "cauchy": "sigma", "linear": None, "polynomial": "degree",
    "power_cosine": "alpha", "arc_cosine": "order",
}  # fmt: skip
DISTRIBUTIONS = (
    "normal",
    "uniform",
    "heavy tails",
    "constant columns",
    "duplicates",
    "one-hot",
    "whole numbers",
    "constant",
)
# An error this many times that of uniform landmarks is bad. Below SMALL both are exact up to the ridge of a network.
BAD, SMALL = 2.0, 2e-2


def points(random: np.random.Generator, kind: str, samples: int, features: int) -> np.ndarray:
    """A data set (samples, features) of a kind, of the order of 1."""
    x = random.normal(size=(samples, features))
    if kind == "uniform":
        x = random.random((samples, features))
    elif kind == "heavy tails":
        x = random.standard_t(1.0, size=(samples, features))
    elif kind == "constant columns":
        x[:, random.random(features) < 0.5] = 1
    elif kind == "duplicates":
        x = x[random.integers(max(1, samples // 10), size=samples)]
    elif kind == "one-hot":
        x = np.eye(features)[random.integers(features, size=samples)]
    elif kind == "whole numbers":
        x = random.integers(-3, 4, size=(samples, features)).astype(float)
    elif kind == "constant":
        x = np.full((samples, features), float(random.normal()))
    return x


def parameter(random: np.random.Generator, name: str | None, scale: float) -> dict[str, float]:
    """A parameter of a kernel; widths are in the units of the data, or of any size."""
    if name == "sigma":
        size = scale * 10 ** random.uniform(-1, 1.5) if random.random() < 0.8 else 10 ** random.uniform(-32, 32)
        return {"sigma": float(size)}
    most = {"alpha": 6, "degree": 4, "order": 1}
    return {} if name is None else {name: int(random.integers(1, most[name] + 1))}


def work(job: Job) -> Job:
    """One fit; says what came of it."""
    random = np.random.default_rng(job["seed"])
    torch.manual_seed(job["seed"])
    kind, kernel = str(random.choice(DISTRIBUTIONS)), str(random.choice(list(KERNELS)))
    samples, features = int(10 ** random.uniform(0, 2.6)), int(10 ** random.uniform(0, 1.5))
    scale = 1.0 if random.random() < 0.4 else float(10 ** random.uniform(-30, 30))
    offset = float(random.choice([0, 0, 0, 1e8, -1e8, 1e3])) * (scale if random.random() < 0.5 else 1)
    dtype = str(random.choice(["float32", "float64"]))
    n = int(10 ** random.uniform(0, 1.6))
    options: dict[str, Any] = {
        "kernel": kernel, "kernel_params": parameter(random, KERNELS[kernel], scale),
        "readout": str(random.choice(READOUTS)), "bound": str(random.choice(["tight", "paper"])),
        "updates": int(random.integers(5, 200)), "random_state": job["seed"],
        "half_life": float(random.uniform(100, 1000)) if random.random() < 0.2 else None,
    }  # fmt: skip
    calls = int(random.choice([0, 0, 1, 3, 10]))  # of partial_fit; none is fit
    with np.errstate(all="ignore"):
        x = (points(random, kind, samples, features) * scale + offset).astype(dtype)
    about = {"kind": kind, "kernel": kernel, "method": "partial_fit" if calls else "fit", **options}
    about = {
        **about,
        "n": n,
        "samples": samples,
        "features": features,
        "scale": scale,
        "offset": offset,
        "dtype": dtype,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = KSMTransformer(n, **options)
            for part in np.array_split(x, min(calls, samples)) if calls else [x]:
                found = found.partial_fit(part) if calls else found.fit(part)
            y = found.transform(x)
        except Exception as error:
            return about | {"outcome": outcome_of(error), "message": f"{type(error).__name__}: {error}"}
    if not np.isfinite(y).all():
        return about | {"outcome": "non-finite"}
    wide = torch.tensor(x).double()
    ours = float(kernel_nrmse(found.kernel_, wide, torch.tensor(y).double())[0])
    uniform = uniform_error(found.kernel_, wide, n, random)
    messages = sorted({str(warning.message) for warning in caught})
    is_bad = ours > max(BAD * uniform, SMALL) or not np.isfinite(ours)
    is_floor = options["bound"] == "paper" and options["readout"] == "neural"
    outcome = "features"
    if is_bad:
        outcome = "above, with a warning" if messages else "above, the paper's own responses" if is_floor else "above"
    return about | {"outcome": outcome, "error": ours, "uniform": uniform, "warnings": messages}


def outcome_of(error: Exception) -> str:
    """Whether an error is a sentence of the package (or of scikit-learn's check of its input), or raw."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    is_ours = isinstance(error, ValueError) and ("ksm_lightning" in last or "sklearn" in last)
    return "refused" if is_ours else "raw error"


def uniform_error(kernel: Kernel, x: torch.Tensor, n: int, random: np.random.Generator) -> float:
    """Median error of Nystroem features of n random points, over three draws."""
    errors = []
    for _ in range(3):
        W = x[torch.tensor(random.permutation(len(x))[:n])]
        errors.append(float(kernel_nrmse(kernel, x, kernel(x, W) @ nystroem_matrix(kernel, W))[0]))
    return float(np.median(errors))


def main(quick: bool) -> list[str]:
    """Run the missing jobs and report all."""
    jobs = [{"seed": seed} for seed in range(100 if quick else FITS)]
    done = run_all("numerics", jobs, work, quick)
    outcomes = collections.Counter(row["outcome"] for row in done)
    kinds = (
        "features",
        "refused",
        "above, with a warning",
        "above, the paper's own responses",
        "above",
        "non-finite",
        "raw error",
    )
    by_kernel = [
        (kernel, *(sum(row["outcome"] == kind for row in done if row["kernel"] == kernel) for kind in kinds))
        for kernel in KERNELS
    ]
    sentences = [row["message"] for row in done if row["outcome"] == "refused"]
    refusals = collections.Counter(re.sub(r"[-+]?\d[\d.e+-]*", "_", text)[:75] for text in sentences)
    return [
        f"{len(done):,} fits of `KSMTransformer` on random data: up to 400 samples of up to 30 features, scales from "
        "1e-30 to 1e30, offsets of up to 1e8, constants, duplicates, heavy tails; all kernels, bounds and readouts, "
        "`fit` and `partial_fit`, float32 and float64. An error counts as above if it is more than twice that of "
        f"Nystroem features of as many random samples and more than {SMALL}.",
        "",
        *table(["kernel", *kinds], [*by_kernel, ("all", *(outcomes[kind] for kind in kinds))]),
        "",
        f"{len(refusals)} different sentences refuse data; the most frequent: "
        + "; ".join(f"{text} ... ({count})" for text, count in refusals.most_common(3))
        + ".",
    ]
