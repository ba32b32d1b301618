"""The divergence guard, resumed adaptive runs, and runs that end by a signal or a full disk."""

import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from helpers.commands import ENDLESS, HALF_MOONS, QUICK
from helpers.processes import PATIENCE, started, wait_until, written_again
from helpers.runs import model, moons
from ksm_lightning.callbacks import DivergenceGuard, UpdateCheckpoint
from ksm_lightning.cli import main
from ksm_lightning.data import ArrayDataModule, HalfMoonsDataModule
from ksm_lightning.evaluation.kernel_error import kernel_nrmse
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.learning.updates import Updates
from ksm_lightning.network import functional
from ksm_lightning.network.preprocessing import Preprocessing
from ksm_lightning.runs.checkpoint import read_checkpoint
from ksm_lightning.runs.logger import RunLogger

pytestmark = pytest.mark.usefixtures("in_tmp_path")

WILD = [Phase(20, 0.01, 0.01, 0.1), Phase(100, 50.0, 5.0, 50.0)]


def trainer(*callbacks, logger=None, **options) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        logger=logger or RunLogger(str(Path("runs").absolute()), "x"),
        enable_progress_bar=False,
        max_epochs=-1,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **options,
    )


def first_non_finite(data, phases) -> tuple[int, str]:
    """The first update, counted from 1, with a quantity that is not finite, and its name, by the paper's formulas."""
    module = model(phases=phases)
    batches = torch.cat([block.x for block in data.train_dataloader()])
    network = module.network
    for update, x in enumerate(batches):
        rates = module.schedule.at(update).rates()
        step = functional.hebbian_step(network.kernel, x, network.W, network.q, network.L, network.ridge)
        for name, value in (("similarities", step.k), ("factorisation", step.factor), ("responses", step.y)):
            if not value.isfinite().all():
                return update + 1, name
        with torch.no_grad():
            network.W -= rates.W * step.gradients.W / network.q.square()[:, None]
            network.q -= rates.q * step.gradients.q
            network.L += rates.L * step.gradients.L
        for name, value in network.named_parameters():
            if not value.isfinite().all():
                return update + 1, name
    raise AssertionError("nothing diverged")


def test_the_first_bad_quantity_and_its_update_are_named():
    update, name = first_non_finite(moons(updates_per_epoch=1000), WILD)
    assert 20 < update < 50
    module = model(phases=WILD)
    callbacks = [DivergenceGuard(energy_limit=1e300), UpdateCheckpoint(every_n_updates=10)]
    with pytest.raises(
        FloatingPointError, match=f"diverged at update {update}: .*{name}.* (failed|non-finite)"
    ) as caught:
        trainer(*callbacks).fit(module, datamodule=moons())
    path = Path("runs/x/version_0/checkpoints/last.ckpt").absolute()
    assert f"The last good checkpoint is {path}." in str(caught.value)
    saved = read_checkpoint(path)
    assert saved["global_step"] == update // 10 * 10
    for parameter, value in module.state_dict().items():
        assert value.isfinite().all()
        assert torch.equal(value, saved["state_dict"][parameter])  # the model is back at its last good weights


def test_a_growing_energy_is_detected_before_anything_is_infinite():
    phases = [
        Phase(20, 0.01, 0.01, 0.1),
        Phase(300, 0.0, 3.0, 0.1),
    ]  # a step of q above the stable limit: the error doubles with every update
    module = model(phases=phases)
    with pytest.raises(FloatingPointError, match=r"at update 2\d: the energy ran away \(to -?[\d.e+]+\)"):
        trainer(DivergenceGuard(energy_limit=20.0)).fit(module, datamodule=moons())
    assert all(value.isfinite().all() for value in module.state_dict().values())


@pytest.mark.filterwarnings("ignore:The network does not respond")  # after such rates
def test_rollback_halves_the_rates_until_the_run_succeeds():
    module = model(phases=[Phase(20, 0.01, 0.01, 0.1), Phase(130, 4.0, 1.0, 3.5)])
    guard = DivergenceGuard("rollback")
    run = trainer(guard, UpdateCheckpoint(every_n_updates=10))
    with pytest.warns(
        UserWarning,
        match=r"diverged at update \d+: .* continuing from the last good weights with all rates .* 0\.\d+",
    ):
        run.fit(module, datamodule=moons())
    assert guard.rollbacks >= 1
    assert module.learner.rate_factor == 0.5**guard.rollbacks
    assert run.global_step == 150
    saved = read_checkpoint("runs/x/version_0/checkpoints/last.ckpt")
    assert saved["ksm_lightning"]["learner"]["rate_factor"] == module.learner.rate_factor
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    again = type(module).load_from_checkpoint("runs/x/version_0/checkpoints/last.ckpt")
    assert again.learner.rate_factor == module.learner.rate_factor


@pytest.mark.filterwarnings("ignore:Training diverged")
def test_rollback_stops_after_max_rollbacks():
    with pytest.raises(FloatingPointError, match="Training diverged at update"):
        trainer(DivergenceGuard("rollback", max_rollbacks=2)).fit(
            model(phases=[Phase(1000, 1e30, 1e30, 1e30)]), datamodule=moons()
        )


def test_single_batches_of_a_plain_dataloader_are_checked_together(monkeypatch):
    monkeypatch.setattr("ksm_lightning.callbacks.guard.UPDATES_AT_ONCE", 50)
    x = moons().train_points.data
    module = model(phases=WILD)
    guard = DivergenceGuard(energy_limit=1e300)
    checks = []
    check = guard._check
    guard._check = lambda *args: (checks.append(args[0].global_step), check(*args))
    with pytest.raises(FloatingPointError, match=r"Training diverged at update (2|3|4)\d:"):
        trainer(guard, log_every_n_steps=5, enable_checkpointing=False).fit(
            module, DataLoader(TensorDataset(x), batch_size=16)
        )
    assert checks == [50]


def test_the_end_of_a_short_run_is_checked():
    x = moons().train_points.data
    wild = model(phases=[Phase(30, 50.0, 5.0, 50.0)])
    with pytest.raises(FloatingPointError, match="Training diverged at update"):
        trainer(DivergenceGuard(), log_every_n_steps=5, enable_checkpointing=False).fit(
            wild, DataLoader(TensorDataset(x), batch_size=16)
        )


def test_a_bad_batch_of_a_plain_dataloader_is_named_with_the_adaptive_schedule():
    x = moons().train_points.data.clone()
    x[100] = torch.nan
    module = model(phases=None, updates=60)
    with pytest.raises(FloatingPointError, match=r"at update 7: the inputs x became non-finite\. Look for outliers"):
        trainer(DivergenceGuard(), log_every_n_steps=5, enable_checkpointing=False).fit(
            module, DataLoader(TensorDataset(x), batch_size=16)
        )
    assert not module.run_state.is_guarded


def spoil_update(monkeypatch, number, only_at_full_rates=False):
    """Make W non-finite before the update with this number, counted from 0."""
    see = Updates._see

    def spoiled(updates, batch, *args):
        [index] = [index for index, each in enumerate(updates._batches) if each is batch]
        rate_factor = updates.rates.__self__.rate_factor
        if updates._numbers[index] == number and not (only_at_full_rates and rate_factor < 1):
            updates.network.W.fill_(torch.nan)
        return see(updates, batch, *args)

    monkeypatch.setattr(Updates, "_see", spoiled)


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_weights_that_become_non_finite_stop_an_adaptive_run(monkeypatch, bound):
    spoil_update(monkeypatch, 25)
    module = model(bound=bound, phases=None, updates=60, acceleration="none")
    with pytest.raises(
        FloatingPointError, match=r"diverged at update 26: the similarities f\(x, W\) became non-finite"
    ):
        trainer(DivergenceGuard(), enable_checkpointing=False).fit(module, datamodule=moons(updates_per_epoch=10))
    assert all(value.isfinite().all() for value in module.state_dict().values())


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_an_adaptive_run_rolls_back_and_ends_well(monkeypatch, bound):
    spoil_update(monkeypatch, 25, only_at_full_rates=True)
    module = model(bound=bound, phases=None, updates=60, acceleration="none")
    guard = DivergenceGuard("rollback")
    with pytest.warns(UserWarning, match=r"diverged at update 26: .* with all rates multiplied by 0\.5"):
        trainer(guard, enable_checkpointing=False).fit(module, datamodule=moons(updates_per_epoch=10))
    assert (guard.rollbacks, module.learner.rate_factor, module.global_step) == (1, 0.5, 60)
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert module.learner.not_finite() == []
    x = moons().train_points.data
    assert kernel_nrmse(module.network.kernel, x, module(x)) < 0.6


def test_a_guard_can_be_used_in_a_second_run():
    guard = DivergenceGuard()
    trainer(guard).fit(model(), datamodule=moons())
    large = model(kernel="polynomial", kernel_params={"degree": 2}, phases=None, updates=20)
    trainer(guard).fit(large, datamodule=Scaled(num_points=200, seed=3))
    assert large.global_step == 20


class Scaled(HalfMoonsDataModule):
    def standardise(self, x):
        return Preprocessing(torch.zeros(2), torch.full((2,), 0.01, dtype=torch.float64))


def test_heavy_tails_are_not_reported_as_divergence(tmp_path):
    """A batch with large similarities has a large energy, so the limit is relative to the batch."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.standard_t(3, (2000, 3)))
    module = model(
        num_neurons=10, in_features=None, kernel="polynomial", kernel_params={"degree": 3}, init="data", phases=None,
        updates=300,
    )  # fmt: skip
    trainer(DivergenceGuard()).fit(module, datamodule=ArrayDataModule(str(tmp_path / "x.npy"), seed=0))
    assert module.global_step == 300
    assert module.learner.not_finite() == []


def test_a_dataloader_without_a_length_is_not_consolidated():
    x = moons().train_points.data

    class Stream(IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            while True:
                yield x[torch.randint(len(x), (16,), generator=generator)]

    module = model(phases=None, updates=30)
    with pytest.warns(UserWarning, match="has no length, so L stays as it was learned: call `consolidate`"):
        trainer(DivergenceGuard(), log_every_n_steps=5, enable_checkpointing=False).fit(
            module, DataLoader(Stream(), batch_size=None)
        )
    assert module.global_step == 30
    module.consolidate([x])
    y = module(x)
    assert torch.allclose(y.mT @ y / len(x), module.network.L, atol=1e-4)


def test_without_a_guard_the_module_checks_every_block():
    with pytest.raises(FloatingPointError, match=r"at or before update 32: the factorisation of L.*DivergenceGuard"):
        trainer().fit(model(phases=WILD), datamodule=moons())


@pytest.mark.parametrize("bound", ["paper", "tight"])
def test_a_run_with_a_guard_is_bitwise_equal_to_one_without(bound):
    modules = [model(bound=bound, phases=None, updates=80) for _ in range(2)]
    for module, callbacks in zip(modules, [[], [DivergenceGuard()]], strict=True):
        trainer(*callbacks).fit(module, datamodule=moons())
    for name, value in modules[0].state_dict().items():
        assert torch.equal(value, modules[1].state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_divergence": "pray"}, "must be 'stop' or 'rollback', got 'pray'"),
        ({"energy_limit": 1.0}, "`energy_limit` must be above 1"),
        ({"max_rollbacks": 0}, "`max_rollbacks` at least 1"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DivergenceGuard(**options)


# ---------------------------------------------------------------------- resuming the adaptive schedule


@pytest.mark.parametrize("bound", ["paper", "tight"])
@pytest.mark.parametrize("stopped_at", [3, 15, 37, 100, 140])
def test_the_adaptive_schedule_resumes_bitwise(stopped_at, bound):
    """Stopped before most relocations, at one, in the middle of a block, at the end of one, and after the last."""
    p = 12 if bound == "paper" else 15
    whole, first, rest = (
        model(num_neurons=12, bound=bound, num_landmarks=p, phases=None, updates=150, in_features=None, init="data")
        for _ in range(3)
    )
    trainer().fit(whole, datamodule=moons())
    trainer(UpdateCheckpoint(), max_steps=stopped_at).fit(first, datamodule=moons())
    path = Path("runs/x/version_1/checkpoints/last.ckpt")
    assert read_checkpoint(path)["global_step"] == stopped_at
    trainer().fit(rest, datamodule=moons(), ckpt_path=path, weights_only=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name
    assert rest.network.ridge == whole.network.ridge
    ours, theirs = (module.learner.best.best for module in (rest, whole))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_checkpoint_of_a_tight_run_restores_its_averages_and_best_weights():
    first = model(bound="tight", phases=None, updates=60)
    trainer(UpdateCheckpoint(), max_steps=37).fit(first, datamodule=moons())
    saved = read_checkpoint("runs/x/version_0/checkpoints/last.ckpt")["ksm_lightning"]["learner"]
    rest = model(bound="tight", phases=None, updates=60)
    path = "runs/x/version_0/checkpoints/last.ckpt"
    trainer(max_steps=37).fit(rest, datamodule=moons(), ckpt_path=path, weights_only=True)
    state = rest.learner.state_dict()
    assert 0 < state["rule"]["steps"] == saved["rule"]["steps"] <= 37
    for part, name in (("rule", "mean"), ("rule", "square"), ("best", "W"), ("best", "q"), ("best", "L")):
        assert torch.equal(state[part][name], saved[part][name]), name
        assert saved[part][name].abs().max() > 0


# ---------------------------------------------------------------------- signals and full disks


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_current_update_and_the_run_resumes_bitwise(number, code):
    options = [*QUICK, ENDLESS, "--trainer.enable_progress_bar=false", "--data.updates_per_epoch=300",
               "--kernel_error.min_updates_between=1000000000"]  # fmt: skip
    endless = ["--trainer.logger.name=first", "--trainer.max_steps=-1", "--checkpoint.every_n_updates=250"]
    checkpoint = Path("runs/first/version_0/checkpoints/last.ckpt")
    with started([sys.executable, "-m", "ksm_lightning.cli", "fit", *options, *endless]) as process:
        wait_until(checkpoint.is_file, process)
        wait_until(written_again(checkpoint), process)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    stopped = int(re.search(r"stopped at update ([\d,]+); continue", err)[1].replace(",", ""))
    assert read_checkpoint(checkpoint)["global_step"] == stopped
    assert stopped >= 300  # the first checkpoint, at update 250, was followed by another
    if number == signal.SIGINT:
        return  # resuming is tested once
    for name, more in (("rest", [f"--ckpt_path={checkpoint}"]), ("whole", [])):
        main(["fit", *options, f"--trainer.logger.name={name}", f"--trainer.max_steps={stopped + 500}", *more])
    found, expected = (
        read_checkpoint(f"runs/{name}/version_0/checkpoints/last.ckpt")["state_dict"] for name in ("rest", "whole")
    )
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_full_disk_gives_a_clear_error_and_leaves_no_partial_file():
    """Simulated by a limit on the file size, below that of a checkpoint with 200 neurons."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [
        sys.executable,
        "-m",
        "ksm_lightning.cli",
        "fit",
        "--config",
        HALF_MOONS,
        "--model.num_neurons=200",
    ]
    command += ["--trainer.max_steps=20", "--checkpoint.every_n_updates=10", "--trainer.enable_progress_bar=false"]
    result = subprocess.run(
        [*command, "--figures.every_n_updates=0"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 2
    sentence = result.stderr.strip().splitlines()[-1]
    assert re.match(
        r"ksm: error: The checkpoint .*last\.ckpt could not be written \(.*File too large.*\); no earlier checkpoint",
        sentence,
    )
    assert not list(Path("runs").rglob("*.draft"))
    assert not list(Path("runs").rglob("*.ckpt"))
