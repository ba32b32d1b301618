"""Processes that are killed before their changes of files, and processes that compete, started by test_stress.py.

``python crash_points.py FOLDER`` runs a few writers, each again and again in a forked process that kills itself before
one of its changes of files, and then once more to the end. Then several processes write the same features. Prints, as
JSON, the number of kills of each writer and what was wrong, and the outcomes of the competition.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import numpy as np
import torch

from helpers.extractors import extractor_of
from helpers.runs import model, moons, trainer
from ksm_lightning import FeatureExtractor, GaussianKernel
from ksm_lightning.baselines.comparison import Comparison
from ksm_lightning.baselines.tables import read_rows
from ksm_lightning.callbacks import FeatureWriter, UpdateCheckpoint
from ksm_lightning.export import export
from ksm_lightning.runs.checkpoint import read_checkpoint
from ksm_lightning.runs.logger import RunLogger


def predict(folder: Path, sigma: float = 0.3) -> None:
    network = model(kernel_params={"sigma": sigma})
    trainer([FeatureWriter(str(folder / "f.npy"))]).predict(network, datamodule=moons(eval_batch_size=64))


def right_features(folder: Path) -> bool:
    """A whole set of files, or none of the features."""
    if not (folder / "f.npy").exists():
        return True
    data = moons()
    features, labels = np.load(folder / "f.npy"), np.load(folder / "f_labels.npy")
    about = json.loads((folder / "f.json").read_text())
    expected = model()(data.test_points.data).numpy()
    return bool(np.allclose(features, expected, atol=1e-5)) and len(labels) == about["samples"] == 200


def compare(folder: Path) -> None:
    x = moons().train_points.data
    methods = ["nystroem_uniform", "kernel_pca"]
    Comparison(GaussianKernel(0.3), x, folder / "out", [2, 3], methods, seeds=[0], max_points=100).run()


def right_rows(folder: Path) -> bool:
    path = folder / "out" / "errors.csv"
    rows = read_rows(path) if path.exists() else []
    return len({row[:3] for row in rows}) == len(rows) and all(0 < row.nrmse < 1 for row in rows)


def save(folder: Path) -> None:
    export(extractor_of(), folder / "e.safetensors", "safetensors", is_new=True)


def right_extractor(folder: Path) -> bool:
    path = folder / "e.safetensors"
    return not path.exists() or FeatureExtractor.load(path).identity == extractor_of().identity


def fit(folder: Path) -> None:
    callbacks, logger = [UpdateCheckpoint(every_n_updates=5)], RunLogger(str(folder), "run")
    trainer(callbacks, logger, enable_checkpointing=True).fit(model(), datamodule=moons())


def right_checkpoints(folder: Path) -> bool:
    return all(read_checkpoint(path)["global_step"] % 5 == 0 for path in folder.glob("run/*/checkpoints/*.ckpt"))


# The writer, the check of what it leaves, the file that says that it has ended, and the step between two kills.
WRITERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], bool], str, int]] = {
    "predict": (predict, right_features, "f.npy", 3),
    "compare": (compare, right_rows, "", 7),
    "export": (save, right_extractor, "e.safetensors", 1),
    "fit": (fit, right_checkpoints, "", 4),
}


def crash(name: str, folder: Path) -> tuple[int, list[str]]:
    """Number of kills, and what was wrong after them."""
    write, is_right, last, step = WRITERS[name]
    files, kills, wrong = folder / "files", 0, []
    for change in range(0, 1000, step):
        shutil.rmtree(folder, ignore_errors=True)
        files.mkdir(parents=True)
        process = forked.run(lambda: write(files), folder / "log", folder=files, kill_at_change=change)
        code = process.wait()
        if code >= 0:  # it has ended before
            return kills, wrong + [process.output()] * (code > 0)
        kills += 1
        if not is_right(files):
            wrong.append(f"a wrong file after the kill before change {change}")
        is_done = bool(last) and (files / last).exists()
        again = forked.run(lambda: write(files), folder / "log")
        if (again.wait() == 0) == is_done:
            wrong.append(f"the run after the kill before change {change}: {again.error()}")
        if not is_right(files) or (last and not (files / last).exists()):
            wrong.append(f"a wrong file after the second run, change {change}")
        hidden = [path.name for path in files.rglob(".*")]
        if hidden and name != "fit":  # a second fit has another folder
            wrong.append(f"left behind, change {change}: {hidden}")
    return kills, [*wrong, "no end"]


def compete(folder: Path) -> dict[str, list[str]]:
    """The errors of four processes that write the same features at the same time, and the files that they leave."""
    files = folder / "files"
    files.mkdir(parents=True)
    sigmas = [0.3, 0.5, 0.7, 0.9]
    processes = [forked.run(lambda sigma=sigma: predict(files, sigma), folder / f"log_{sigma}") for sigma in sigmas]
    codes = [process.wait() for process in processes]
    found, x = torch.tensor(np.load(files / "f.npy")), moons().test_points.data
    of = [sigma for sigma in sigmas if torch.allclose(model(kernel_params={"sigma": sigma})(x), found, atol=1e-5)]
    return {
        "errors": [process.error() for process, code in zip(processes, codes, strict=True) if code],
        "winners": [str(sigma) for sigma, code in zip(sigmas, codes, strict=True) if code == 0],
        "features of": list(map(str, of)),
        "files": sorted(path.name for path in files.iterdir()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    kills = {name: crash(name, root / name) for name in WRITERS}
    print(json.dumps({"kills": kills, "competition": compete(root / "competition")}))
