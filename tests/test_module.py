"""The LightningModule: updates against the paper's rules, logging, schedules, plain dataloaders and error messages."""

import itertools
import warnings

import lightning
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from helpers import references
from helpers.runs import Recorder, fit, model, moons, trainer
from ksm_lightning.callbacks import KernelErrorEvaluation, KMeansProbe, LinearProbe
from ksm_lightning.data import ArrayDataModule
from ksm_lightning.kernels import GaussianKernel, auto_width
from ksm_lightning.learning import candidate_count
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.learning.updates import Updates
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.network import functional


def by_hand(module, data, updates, rates):
    """W, q and L after the paper's three rules in float64, with gradients by autograd."""
    W, q, L = (p.detach().double().clone() for p in (module.network.W, module.network.q, module.network.L))
    kernel, ridge = GaussianKernel(0.3), module.network.ridge
    batches = torch.cat([block.x for block in data.train_dataloader()])[:updates].double()
    for update, x in enumerate(batches):
        eta_w, eta_q, eta_l = rates(update)
        y = q * kernel(x, W) @ torch.linalg.inv(L + ridge * torch.eye(len(q)))
        leaves = [t.clone().requires_grad_() for t in (W, q, L)]
        references.differentiable_energy(kernel, x, y, *leaves, ridge).backward()
        W = W - eta_w / q[:, None] ** 2 * leaves[0].grad
        q, L = q - eta_q * leaves[1].grad, L + eta_l * leaves[2].grad
    return W, q, L


def test_ten_updates_equal_the_papers_rules_in_float64():
    module = model().double()
    expected = by_hand(module, moons(), 10, lambda update: (0.01, 0.02, 0.1))
    trainer = fit(module, precision="64-true")
    assert trainer.global_step == 10
    for parameter, reference in zip((module.network.W, module.network.q, module.network.L), expected, strict=True):
        assert_close(parameter.detach(), reference, rtol=1e-9, atol=1e-9)


def test_phases_change_rates_at_their_update():
    phases = [Phase(3, 0.01, 0.02, 0.1), Phase(4, 0.001, 0.002, 0.3)]
    module = model(phases=phases).double()
    expected = by_hand(module, moons(), 7, lambda update: (0.01, 0.02, 0.1) if update < 3 else (0.001, 0.002, 0.3))
    assert fit(module, precision="64-true").global_step == 7
    assert_close(module.network.L.detach(), expected[2], rtol=1e-9, atol=1e-9)


def test_phases_change_kernel_parameters():
    module = model(
        kernel="power_cosine",
        kernel_params={"alpha": 3},
        phases=[Phase(2, kernel_params={"alpha": 1}), Phase(2), Phase(2, kernel_params={"alpha": 4})],
        acceleration="none",
    )
    seen = []
    original = Updates._see

    def spy(updates, *args):
        seen.append(updates.network.kernel.alpha)
        return original(updates, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updates, "_see", spy)
        fit(module)
    assert seen == [1, 1, 3, 3, 4, 4]
    assert module.network.kernel.alpha == 4


def test_a_homogeneous_kernel_keeps_q_at_one():
    module = model(kernel="power_cosine", kernel_params={"alpha": 2}, phases=[Phase(5, eta_q=0.5)])
    fit(module)
    assert module.network.q.eq(1).all()
    learned = model(phases=[Phase(5, eta_q=0.5)])
    fit(learned)
    assert learned.network.q.ne(1).any()


def test_one_optimizer_has_three_named_groups_with_the_last_rates():
    module = model(phases=[Phase(3, 0.01, 0.02, 0.1), Phase(4, 0.001, 0.002, 0.3)])
    assert [group["name"] for group in module.configure_optimizers().param_groups] == ["W", "q", "L"]
    trainer = fit(module)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.001, 0.002, 0.3]


def test_a_run_ends_with_its_schedule_or_with_max_steps():
    assert fit(model(phases=[Phase(70)])).global_step == 70
    assert fit(model(phases=[Phase(70)]), max_steps=33).global_step == 33


def test_logged_energy_equals_the_float64_reference():
    module, data, logger = model(phases=[Phase(20)], acceleration="none"), moons(), Recorder()
    states = {}

    def remember(update):
        states[update] = {name: p.detach().clone() for name, p in module.network.named_parameters()}

    original = Updates._see

    def spy(*args):
        remember(len(states))
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Updates, "_see", spy)
        fit(module, data, logger=logger, log_every_n_steps=5)
    assert sorted(step for step in logger.metrics if "train/energy" in logger.metrics[step]) == [5, 10, 15, 20]
    kernel, ridge = GaussianKernel(0.3), module.network.ridge
    batches = torch.cat([block.x for block in moons().train_dataloader()])
    for step in (5, 10, 15, 20):
        state = {name: value.double() for name, value in states[step - 1].items()}
        k = kernel(batches[step - 1].double(), state["W"])
        y = functional.responses(state["q"] * k, state["L"], ridge)
        expected = references.energy(k, y, torch.ones(6), state["q"], state["L"], ridge)
        assert logger.metrics[step]["train/energy"] == pytest.approx(expected, rel=1e-5)
        terms = [logger.metrics[step][f"train/energy_{name}"] for name in functional.EnergyTerms._fields]
        assert sum(terms) == pytest.approx(expected, rel=1e-5)


def test_logged_names_and_counts():
    logger = Recorder()
    module = model(phases=[Phase(6, 0.01, 0.02, 0.1), Phase(6, 0.001, 0.002, 0.01)])
    data = moons(updates_per_epoch=6)
    fit(module, data, logger=logger, log_every_n_steps=3, callbacks=[KernelErrorEvaluation()])
    training = {step: metrics for step, metrics in logger.metrics.items() if "train/energy" in metrics}
    assert sorted(training) == [3, 6, 9, 12]
    expected = {"train/energy", "weights/min_abs_q", "weights/condition_L"}
    expected |= {f"train/energy_{name}" for name in ("feedforward", "gain", "lateral", "lateral_cost", "ridge")}
    expected |= {f"weights/{kind}_{name}" for kind in ("rate", "gradient_norm") for name in "WqL"}
    assert expected <= set(training[3])
    assert [training[step]["weights/rate_W"] for step in (3, 6, 9, 12)] == [0.01, 0.01, 0.001, 0.001]
    # Validations are logged at their update, not at the number of blocks.
    assert [step for step, metrics in logger.metrics.items() if {"val/kernel_nrmse", "val/energy"} <= set(metrics)] == [
        6,
        12,
    ]


@pytest.mark.parametrize("options", [{}, {"bound": "tight", "num_landmarks": 9}, {"kernel": "linear"}], ids=str)
def test_the_bound_on_a_fixed_sample_falls_smoothly_from_update_0(options):
    logger = Recorder()
    kernel_params = {} if options.get("kernel") else {"sigma": 0.3}
    module = model(
        phases=None, updates=300, in_features=None, init="data", **{"kernel_params": kernel_params, **options}
    )
    fit(module, moons(batch_size=512, updates_per_epoch=1000), logger=logger, callbacks=[KernelErrorEvaluation()])
    bounds = {step: metrics["train/bound"] for step, metrics in logger.metrics.items() if "train/bound" in metrics}
    assert list(bounds) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    total = max(bounds.values()) - min(bounds.values())
    values = list(bounds.values())
    if options.get("bound") != "tight":  # whose steps of W have a fixed length until they decrease
        assert all(after <= before + 0.1 * total for before, after in itertools.pairwise(values))
    assert values[-1] < min(values) + 0.1 * total
    assert module.consolidate([moons().train_points.data]) == pytest.approx(values[-1], rel=1e-4)
    errors = {step for step, metrics in logger.metrics.items() if "val/kernel_nrmse" in metrics}
    assert errors == {0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300}


def test_errors_between_validations_do_not_reach_monitors():
    seen = []

    class Monitor(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append("val/kernel_nrmse" in trainer.callback_metrics)

    fit(model(phases=[Phase(40)]), logger=Recorder(), callbacks=[KernelErrorEvaluation(), Monitor()])
    assert len(seen) > 4
    assert not any(seen)


def test_logged_health_is_that_of_the_weights():
    logger, module = Recorder(), model(phases=[Phase(1)])
    module.network.q.data = torch.tensor([0.5, -0.1, 1.0, 1.0, 1.0, 1.0])
    L = module.network.L.detach().clone()
    fit(module, logger=logger, log_every_n_steps=1)
    assert logger.metrics[1]["weights/min_abs_q"] == pytest.approx(0.1)
    exact = torch.linalg.cond(L + 1e-3 * torch.eye(6)).item()
    assert logger.metrics[1]["weights/condition_L"] == pytest.approx(exact, rel=1e-5)


def test_the_logged_condition_number_is_a_lower_bound_within_a_factor_of_30():
    logger, module = Recorder(), model(phases=[Phase(200)])
    fit(module, logger=logger, log_every_n_steps=200)
    exact = torch.linalg.cond(module.network.L.detach().double() + 1e-3 * torch.eye(6)).item()
    assert exact / 30 < logger.metrics[200]["weights/condition_L"] <= exact * 1.1


def test_logging_and_evaluations_do_not_change_training():
    quiet, chatty = model(phases=[Phase(40)]), model(phases=[Phase(40)])
    fit(quiet, moons(updates_per_epoch=10))
    evaluations = [KernelErrorEvaluation(), LinearProbe(labels_per_class=5), KMeansProbe(starts=2)]
    trainer = fit(chatty, moons(updates_per_epoch=10), Recorder(), log_every_n_steps=1, callbacks=evaluations)
    assert {"val/kernel_nrmse", "val/probe_accuracy", "val/kmeans_accuracy_y"} <= set(trainer.callback_metrics)
    for a, b in zip(quiet.parameters(), chatty.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_does_not_depend_on_the_block_size(monkeypatch):
    large, single = model(phases=[Phase(40)]), model(phases=[Phase(40)])
    fit(large)
    monkeypatch.setattr("ksm_lightning.data.loaders.UPDATES_AT_ONCE", 1)
    fit(single)
    for a, b in zip(large.parameters(), single.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_plain_dataloader_trains_the_module():
    torch.manual_seed(0)
    x, labels = torch.randn(64, 1, 1, 2), torch.zeros(64)
    module = model(phases=[Phase(6)])
    run = trainer()
    run.fit(module, DataLoader(TensorDataset(x, labels), batch_size=16))
    assert run.global_step == 6


def test_a_second_fit_continues_the_first():
    module = model(phases=[Phase(5)], init="data")
    fit(module)
    before = module.network.W.detach().clone()
    fit(module, max_steps=0)
    assert torch.equal(module.network.W, before)


def test_the_input_size_and_the_start_come_from_the_data():
    module = model(in_features=None, init="data", phases=[Phase(1, 0.0, 0.0, 0.0)])
    with pytest.raises(ValueError, match="The input size is known after `fit` only"):
        module(torch.zeros(1, 2))
    data = moons()
    fit(module, data)
    assert module.hparams["in_features"] == 2
    is_point = (module.network.W.detach()[:, None] == data.train_points.data).all(2)  # (n, samples)
    assert is_point.any(1).all()


def test_divergence_stops_the_run_and_names_the_parameter():
    module = model(phases=[Phase(200, eta_w=1e30, eta_q=1e30)])
    with pytest.raises(FloatingPointError, match=r"diverged at or before update \d+: .*not finite"):
        fit(module, logger=Recorder(), log_every_n_steps=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "nonsense"}, "No kernel is registered as 'nonsense'"),
        ({"kernel_params": {"sigma": -1.0}}, "`sigma` must be positive"),
        ({"ridge": -1.0}, "`ridge` must be positive"),
        ({"num_neurons": 0}, "`num_neurons` must be at least 1"),
        ({"in_features": 0}, "`in_features` must be at least 1"),
        ({"init": "luck"}, "`init` must be"),
        ({"init_scale": 0.0}, "must be positive and finite"),
        ({"phases": [Phase(1, kernel_params={"alpha": 1})]}, "has no parameter 'alpha'"),
        ({"phases": [Phase(1, kernel_params={"sigma": 0.0})]}, "`sigma` must be positive"),
    ],
)
def test_invalid_hyper_parameters_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        model(**options)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: fit(model(in_features=3)), "The data has 2 features, but the model was made for in_features=3"),
        (lambda: fit(model(), precision="bf16-mixed"), "needs full precision"),
    ],
)
def test_invalid_runs_are_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def plain_loader(x, **options) -> DataLoader:
    return DataLoader(TensorDataset(x), **{"batch_size": 16, **options})


@pytest.mark.parametrize("options", [{}, {"bound": "tight"}, {"phases": [Phase(5)], "updates": None}], ids=str)
def test_a_plain_dataloader_starts_like_a_datamodule(options):
    options = {
        "kernel_params": {"sigma": "auto"},
        "in_features": None,
        "init": "data",
        "updates": 5,
        "phases": None,
    } | options
    data, starts = moons(), []

    class Start(lightning.Callback):
        def on_train_start(self, trainer, module):
            starts.append({name: value.clone() for name, value in module.state_dict().items()})

    modules = [model(**options), model(**options)]
    torch.manual_seed(7)
    trainer([Start()]).fit(modules[0], datamodule=data)
    torch.manual_seed(7)
    trainer([Start()]).fit(modules[1], plain_loader(data.train_points.data))
    for name, value in starts[0].items():
        assert torch.equal(starts[1][name], value), name
    for name in ("in_features", "ridge", "kernel_params"):
        assert modules[0].hparams[name] == modules[1].hparams[name], name
    assert modules[1].global_step == 5


def test_a_plain_dataloader_is_read_as_far_as_the_start_needs_and_trains_on_the_same_batches():
    x, read = moons(num_points=400).train_points.data, []

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            read.append(index)
            return x[index % len(x)]

    loader = DataLoader(Rows(), batch_size=500, shuffle=True)
    module = model(phases=None, updates=2, in_features=None, init="data", consolidate=False)
    trainer().fit(module, loader)
    start = candidate_count(6, 2)
    assert start <= len(read) - 1000 < start + 500
    assert read[:1000] == read[-1000:]


def test_a_plain_dataloader_without_batches_is_an_error():
    with pytest.raises(ValueError, match="The training loader has no batches"):
        trainer().fit(model(in_features=None, init="data"), plain_loader(torch.zeros(0, 2)))


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("phases", [None, [Phase(20)]], ids=["adaptive", "phases"])
def test_a_network_that_does_not_respond_is_reported_once(is_plain, phases, tmp_path):
    x = 100 * torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "x.npy", x.numpy())
    module = model(phases=phases, updates=None if phases else 20, in_features=8, ridge=1.0, consolidate=False)
    source = plain_loader(x) if is_plain else {"datamodule": ArrayDataModule(str(tmp_path / "x.npy"))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer().fit(module, **source) if isinstance(source, dict) else trainer().fit(module, source)
    found = [str(one.message) for one in caught if "does not respond to the data" in str(one.message)]
    responses = module(x).norm(dim=1).max()
    assert len(found) == (responses < 3e-4), responses
    if phases:
        assert "for each of 300 points" in found[0]
        assert "init=data" in found[0]


def tight(**options):
    return model(bound="tight", phases=None, **{"updates": 40, **options})


def test_a_tight_module_trains_and_ends_with_the_exact_Q_and_L():
    module, logger = tight(num_landmarks=9, init="data", in_features=None), Recorder()
    run = fit(module, moons(updates_per_epoch=10), logger=logger, log_every_n_steps=10)
    assert run.global_step == 40
    assert [group["name"] for group in run.optimizers[0].param_groups] == ["W", "Q", "L"]
    rates = module.learner.rates(39, 16)
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [rates.W, rates.q, rates.L]
    assert (module.network.W.shape, module.network.Q.shape) == ((9, 2), (6, 9))
    x = moons().train_points.data
    y = module(x)
    assert_close(y.mT @ y / len(x), module.network.L.detach(), rtol=1e-3, atol=1e-4)
    energies = [metrics["train/energy"] for metrics in logger.metrics.values() if "train/energy" in metrics]
    assert len(energies) == 4
    bound = logger.metrics[40]["train/bound"]
    assert module.network.energy_of(x).item() == pytest.approx(bound, rel=1e-3)


def test_the_tight_bound_has_a_lower_error_than_the_papers():
    x, errors = moons().train_points.data, {}
    for bound in ("paper", "tight"):
        module = model(bound=bound, num_neurons=24, phases=None, updates=200, init="data", in_features=None)
        fit(module, moons(batch_size=128))
        errors[bound] = references.nrmse(module.kernel(x, x), module(x))
    assert errors["tight"] < 0.8 * errors["paper"]


def test_a_tight_module_learns_from_a_plain_dataloader():
    module = tight(updates=30)
    run = trainer()
    run.fit(module, DataLoader(TensorDataset(moons().train_points.data), batch_size=50))
    assert run.global_step == 30
    assert module.learner.not_finite() == []


def test_a_tight_module_does_not_depend_on_the_block_size(monkeypatch):
    large, single = tight(), tight()
    fit(large)
    monkeypatch.setattr("ksm_lightning.data.loaders.UPDATES_AT_ONCE", 1)
    fit(single)
    for a, b in zip(large.parameters(), single.parameters(), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------- what is given and what is measured


def angular(**options):
    """A model whose ridge depends on the data, as f(x, x) does."""
    return model(kernel="power_cosine", kernel_params={"alpha": 2}, init="data", in_features=None, **options)


def test_a_measured_ridge_is_taken_from_the_checkpoint_whatever_the_seed(tmp_path):
    path, first, fresh, second, third = tmp_path / "half.ckpt", *(angular(phases=None, updates=20) for _ in range(4))

    def many():  # more points than the start looks at, so that the measured ridge depends on the seed
        return moons(seed=None, num_points=4000)

    fit(first, many(), max_steps=10).save_checkpoint(path)
    torch.manual_seed(1)  # `model` sets the seed, and the start uses the one of the fit
    fit(fresh, many(), max_steps=1)
    assert fresh.network.ridge != first.network.ridge
    run = trainer()
    run.fit(second, datamodule=many(), ckpt_path=path, weights_only=True)
    assert run.global_step == 20
    assert second.network.ridge == second.hparams["ridge"] == first.network.ridge
    run.validate(third, datamodule=many(), ckpt_path=path, weights_only=True, verbose=False)
    assert torch.equal(third.network.W, first.network.W)


def test_a_ridge_that_is_not_given_is_taken_from_the_checkpoint(tmp_path):
    fit(model(ridge=0.01, phases=[Phase(5)])).save_checkpoint(tmp_path / "x.ckpt")
    resumed = model(phases=[Phase(9)])
    run = trainer()
    run.fit(resumed, datamodule=moons(), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert (run.global_step, resumed.network.ridge, resumed.hparams["ridge"]) == (9, 0.01, 0.01)
    with pytest.raises(ValueError, match=r"has ridge=0\.01, but the model has 0.02: remove `ridge`"):
        run.fit(model(ridge=0.02, phases=[Phase(9)]), datamodule=moons(), ckpt_path=tmp_path / "x.ckpt")


def test_a_subclass_may_have_hyper_parameters_of_its_own():
    class Annotated(KernelSimilarityMatching):
        def __init__(self, note: str = "", **options):
            super().__init__(**options)
            self.save_hyperparameters({"note": note})

    module = Annotated(note="mine", num_neurons=5, kernel_params={"sigma": 0.3}, updates=6)
    fit(module, moons())
    assert module.hparams["note"] == "mine"
    assert module.network.W.shape == (5, 2)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match=r"There is no option 'num_neuron'; the options are num_neurons, bound"):
        KernelSimilarityMatching(num_neuron=5)


@pytest.mark.parametrize("options", [{"updates": 10}, {"phases": [Phase(10)]}])
def test_a_width_of_auto_is_chosen_from_the_first_batch_of_another_loader(options):
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    model = KernelSimilarityMatching(num_neurons=4, in_features=3, init="normal", **options)
    assert model.hparams["kernel_params"] == {"sigma": "auto"}
    run = lightning.Trainer(
        max_epochs=-1, logger=False, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu",
        enable_model_summary=False,
    )  # fmt: skip
    run.fit(model, DataLoader(TensorDataset(x), batch_size=64))
    assert model.hparams["kernel_params"] == {"sigma": auto_width(x)}
    assert model.network.kernel.sigma == auto_width(x)
