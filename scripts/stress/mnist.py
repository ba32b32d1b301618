"""MNIST with 800 neurons and no warm-up: errors before and after consolidation, and of the other readouts."""

import tempfile
from typing import Any

import lightning
import torch
from common import run_all

from ksm_lightning import KernelSimilarityMatching
from ksm_lightning.callbacks import DivergenceGuard
from ksm_lightning.data import CroppedMNISTDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.kernels.pairs import random_subset
from ksm_lightning.network.readout import READOUTS

NEURONS, UPDATES = 800, 4000


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One training by Lightning, and the errors over a random 10,000 digits."""
    torch.set_num_threads(2)
    lightning.seed_everything(job["seed"])
    data = CroppedMNISTDataModule(updates_per_epoch=UPDATES)
    model = KernelSimilarityMatching(
        job["neurons"], kernel="power_cosine", kernel_params={"alpha": job["alpha"]}, updates=job["updates"],
        consolidate=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1,
            limit_val_batches=0, default_root_dir=folder, callbacks=[DivergenceGuard()],
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
    x = data.train_points.take(random_subset(len(data.train_points), 10_000))
    online = model.features(x)
    bound = model.consolidate()
    features = [online, *(model.features(x, readout, data.readout_sample(readout)) for readout in READOUTS)]
    errors = kernel_nrmse(model.network.kernel, x, *features).tolist()
    return {"bound": bound, **dict(zip(("online", *READOUTS), errors, strict=True))}


def main(quick: bool) -> list[str]:
    """Run what is missing, and report."""
    neurons, updates = (50, 200) if quick else (NEURONS, UPDATES)
    jobs = [
        {"alpha": alpha, "seed": seed, "neurons": neurons, "updates": updates}
        for alpha in (1, 2, 3, 4)
        for seed in range(1 if quick or alpha in (2, 4) else 2)
    ]
    done = run_all("mnist", jobs, work, quick, processes=1)
    lines = [
        f"{neurons} neurons, {updates:,} updates of the adaptive schedule, batch 64. Errors over a random 10,000 "
        "digits; online is before consolidation, J the bound over all 70,000 after it.",
        "",
        "| alpha | seed | J | online | neural | Nystroem on W | least squares on W |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in done:
        cells = " | ".join(f"{row[name]:.4f}" for name in ("online", *READOUTS))
        lines.append(f"| {row['alpha']} | {row['seed']} | {row['bound']:.1f} | {cells} |")
    return lines
