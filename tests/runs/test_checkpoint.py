"""Checkpoints: their content, exact resumption, and files that are refused."""

import pickle
import re
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from helpers.checkpoints import changed
from helpers.processes import PATIENCE
from helpers.runs import SHORT, fit, model, moons, trainer
from ksm_lightning.kernels import GaussianKernel, register_kernel, registry
from ksm_lightning.learning.schedule import Phase
from ksm_lightning.module import KernelSimilarityMatching
from ksm_lightning.runs.checkpoint import check_content, read_checkpoint
from ksm_lightning.runs.digest import digest_of


@pytest.fixture
def saved(tmp_path):
    module = model()
    fit(module).save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    return module, tmp_path / "x.ckpt"


def test_a_checkpoint_holds_only_tensors_and_primitives(saved):
    content = torch.load(saved[1], weights_only=True)
    assert content["hyper_parameters"] == {
        "num_neurons": 6,
        "bound": "paper",
        "num_landmarks": 6,
        "in_features": 2,
        "kernel": "gaussian",
        "kernel_params": {"sigma": 0.3},
        "ridge": 1e-3,
        "init": "normal",
        "init_scale": 0.5,
        "solver": "closed_form",
        "phases": [{"updates": 10, "eta_w": 0.01, "eta_q": 0.02, "eta_l": 0.1, "kernel_params": {}}],
        "updates": None,
        "consolidate": False,
        "inverse": "auto",
        "acceleration": "auto",
        "parallel": "data",
    }
    section = content["ksm_lightning"]
    preprocessing = section.pop("preprocessing")
    learner = {"rate_factor": 1.0, "inverse": {}, "rule": {}}
    assert section.pop("training") == {
        "data": {"num_points": 200, "num_features": 2, "sha256": moons().fingerprint.sha256},
        "centre": True, "scaling": "none", "batch_size": 16, "processes": 1, "precision": "32-true", "seed": 0,
    }  # fmt: skip
    assert section.pop("covers") == sorted(content)
    assert re.fullmatch("[0-9a-f]{64}", section.pop("digest"))
    assert set(section.pop("run")) == {"needs_finish", "epoch_energy"}
    assert section == {"format": 5, "learner": learner}
    assert {name: type(value).__name__ for name, value in preprocessing.items()} == {
        "mean": "Tensor", "scale": "Tensor", "image_shape": "NoneType", "crop": "int"
    }  # fmt: skip
    assert set(content["state_dict"]) == {"network.W", "network.q", "network.L"}


def test_a_loaded_model_has_the_responses_of_the_saved_one(saved):
    module, path = saved
    x = torch.randn(5, 2)
    loaded = KernelSimilarityMatching.load_from_checkpoint(path)
    assert torch.equal(loaded(x), module(x))
    slow = KernelSimilarityMatching.load_from_checkpoint(path, solver="dynamics")
    assert slow.network.solver == "dynamics"


def test_fit_does_not_restart_a_loaded_model(tmp_path):
    module = model(init="data")
    fit(module).save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    loaded = KernelSimilarityMatching.load_from_checkpoint(tmp_path / "x.ckpt")
    fit(loaded, max_steps=0)
    assert torch.equal(loaded.network.W, module.network.W)


def test_a_checkpoint_of_a_warm_up_has_the_kernel_of_the_warm_up(tmp_path):
    phases = [Phase(20, kernel_params={"alpha": 1}), Phase(20)]
    module = model(kernel="power_cosine", kernel_params={"alpha": 3}, phases=phases)
    for updates, alpha in ((10, 1), (20, 3), (30, 3)):
        path = tmp_path / f"{updates}.ckpt"
        fit(module, max_steps=updates).save_checkpoint(path, weights_only=False)
        assert KernelSimilarityMatching.load_from_checkpoint(path).network.kernel.alpha == alpha


@pytest.mark.parametrize("stopped_at", [7, 20, 26, 40])
def test_resuming_is_bitwise_exact_across_phases_and_epochs(tmp_path, stopped_at):
    phases = [Phase(25, kernel_params={"alpha": 1}), Phase(35, 0.001, 0.001, 0.01)]
    options = {"kernel": "power_cosine", "kernel_params": {"alpha": 3}, "phases": phases}

    def run(module, seed, **arguments):
        started = trainer(max_steps=arguments.pop("max_steps", -1))
        started.fit(module, datamodule=moons(updates_per_epoch=20, seed=seed), **arguments)
        return started

    whole = model(**options)
    run(whole, seed=3)
    part = model(**options)
    run(part, seed=3, max_steps=stopped_at).save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    torch.manual_seed(99)  # another process; the seed of the batches comes from the checkpoint
    resumed = KernelSimilarityMatching(num_neurons=6, in_features=2, init="normal", **options)
    assert run(resumed, seed=None, ckpt_path=tmp_path / "x.ckpt", weights_only=True).global_step == 60
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


# ---------------------------------------------------------------------- refused files


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle ran')",))


def spoiled(path, **values):
    """Replace values of the preprocessing."""
    changed(path, lambda content: content["ksm_lightning"]["preprocessing"].update(values))


def learner_changed(path, **values):
    """Replace values of the learner's state."""
    changed(path, lambda content: content["ksm_lightning"]["learner"].update(values))


def tracked(inverse, **values):
    """The state of a tracked inverse."""
    return {"inverse": inverse, "ridge": 1e-3, "drift": 0.0, "age": 1, **values}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.unlink(), "There is no checkpoint"),
        (lambda p: p.write_bytes(b""), "damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "damaged"),
        (lambda p: p.write_bytes(b"hello" * 100), "damaged"),
        (lambda p: torch.save({"state_dict": Bomb()}, p), "could run code"),
        (lambda p: p.write_bytes(pickle.dumps(Bomb())), "could run code"),
        (lambda p: torch.save([1, 2], p), "is not a checkpoint of ksm_lightning"),
        (lambda p: torch.save({"state_dict": {}}, p), "is not a checkpoint of ksm_lightning"),
        (
            lambda p: changed(p, lambda c: c["hyper_parameters"].update(kernel="mine")),
            "No kernel is registered as 'mine'",
        ),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].update(kernel="os.system")), "No kernel is registered"),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].update(_instantiator="os.system")), "_instantiator"),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].update(phases=[])), "at least one phase"),
        (
            lambda p: changed(p, lambda c: c["hyper_parameters"].update(num_neurons=7, num_landmarks=7)),
            r"should be \(7, 2\) and is \(6, 2\)",
        ),
        (
            lambda p: changed(p, lambda c: c["hyper_parameters"].update(num_neurons=7)),
            "cannot be used: With the paper's bound every neuron has one landmark",
        ),
        (
            lambda p: changed(p, lambda c: c["hyper_parameters"].update(bound="loose")),
            "cannot be used: `bound` must be one of 'paper', 'tight', got 'loose'",
        ),
        (
            lambda p: changed(p, lambda c: c["hyper_parameters"].update(bound="tight", phases=None)),
            r"network.Q should be \(6, 6\) and is None",
        ),
        (lambda p: changed(p, lambda c: c["state_dict"].pop("network.q")), "network.q should be"),
        (lambda p: changed(p, lambda c: c["state_dict"].update({"network.W": 7})), "network.W should be"),
        (
            lambda p: changed(p, lambda c: c.pop("ksm_lightning")),
            "another version of ksm_lightning: its format is None",
        ),
        (
            lambda p: changed(p, lambda c: c["ksm_lightning"].update(format=99)),
            "its format is 99, and this version reads 5",
        ),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].update(phases=None, ridge=None)), "its ridge is None"),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].update(in_features=None)), "its in_features None"),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].update(num_neurons="6")), "cannot be used"),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].update(init="zeros")), "`init` must be one of"),
        (lambda p: changed(p, lambda c: c["hyper_parameters"].pop("init")), "another version or model: .*init"),
        (lambda p: changed(p, lambda c: c.pop("global_step")), "does not contain its number of updates"),
        (lambda p: learner_changed(p, rate_factor=float("nan")), "its rate_factor is nan"),
        (lambda p: learner_changed(p, rate_factor=2.0), "its rate_factor is 2.0"),
        (lambda p: learner_changed(p, inverse=None), "its tracked inverse does not fit the network"),
        (lambda p: learner_changed(p, inverse={"inverse": torch.eye(6)}), "its tracked inverse does not fit"),
        (lambda p: learner_changed(p, inverse=tracked(torch.eye(7))), "its tracked inverse does not fit the network"),
        (lambda p: learner_changed(p, inverse=tracked(torch.eye(6), drift=float("inf"))), "its tracked inverse"),
        (lambda p: learner_changed(p, rule=None), "its state of the rule does not fit the network"),
        (lambda p: learner_changed(p, rule={"square": torch.zeros(5)}), "its state of the rule does not fit"),
        (lambda p: changed(p, lambda c: c["ksm_lightning"].pop("preprocessing")), "preprocessing is incomplete"),
        (lambda p: changed(p, lambda c: c["ksm_lightning"].update(preprocessing=[1])), "preprocessing is incomplete"),
        (lambda p: spoiled(p, mean=None), "x.ckpt is damaged: .*preprocessing is incomplete"),
        (lambda p: spoiled(p, mean=torch.full((2,), torch.nan)), "a mean that is not finite"),
        (lambda p: spoiled(p, scale=torch.zeros(2)), "a scale that is not positive"),
        (lambda p: spoiled(p, image_shape=7), "an invalid image shape or crop: 7, 0"),
        (lambda p: spoiled(p, image_shape=[3, 3]), "Images of 3 x 3 pixels do not have 2 features"),
        (lambda p: spoiled(p, crop="4"), "an invalid image shape or crop: None, 4"),
        (lambda p: spoiled(p, crop=4), "Only images can be cropped"),
        (
            lambda p: spoiled(p, mean=torch.zeros(3), scale=torch.ones(3)),
            "contradicts itself: its preprocessing has 3 features, and the network has 2",
        ),
    ],
)
def test_an_invalid_checkpoint_is_refused_in_one_sentence(saved, spoil, message):
    path = saved[1]
    spoil(path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        KernelSimilarityMatching.load_from_checkpoint(path)
    assert "\n" not in str(caught.value)


UNSEALED = {
    "a weight": lambda c: c["state_dict"]["network.W"].view(torch.int32)[0, 0].bitwise_xor_(1 << 30),
    "the last bit of a weight": lambda c: c["state_dict"]["network.L"].view(torch.int32)[-1, -1].bitwise_xor_(1),
    "a hyper-parameter": lambda c: c["hyper_parameters"].update(ridge=0.002),
    "the learner": lambda c: c["ksm_lightning"]["learner"].update(rate_factor=0.5),
    "the preprocessing": lambda c: c["ksm_lightning"]["preprocessing"]["mean"].add_(1),
    "the conditions": lambda c: c["ksm_lightning"]["training"].update(batch_size=17),
    "the number of updates": lambda c: c.update(global_step=11),
    "the seed of the batches": lambda c: c["HalfMoonsDataModule"].update(seed=4),
    "Lightning's loops": lambda c: c["loops"]["fit_loop"]["epoch_progress"]["total"].update(ready=7),
    "a callback": lambda c: c["callbacks"].update(mine={"best": 1.0}),
    "the optimizer": lambda c: c["optimizer_states"][0]["param_groups"][0].update(lr=1.0),
    "a missing part": lambda c: c.pop("lr_schedulers"),
    "a part under another name": lambda c: c.update(Other=c.pop("HalfMoonsDataModule")),
    "the type of a number": lambda c: c["optimizer_states"][0]["param_groups"][0].update(params=[0.0]),
    "nested too deeply": lambda c: c.update(callbacks=nested(100_000)),
}


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("case", UNSEALED)
def test_a_checkpoint_that_does_not_match_its_digest_is_refused(saved, case):
    """Before there was a digest, every one of these was loaded."""
    module, path = saved
    content = torch.load(path, weights_only=True)
    UNSEALED[case](content)
    if case == "nested too deeply":  # such a file cannot be written by torch.save
        with pytest.raises(ValueError, match="The checkpoint x is damaged: its content does not match its digest"):
            check_content(content, "The checkpoint x")
        return
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"x.ckpt is damaged: its content does not match its digest; use an older"):
        read_checkpoint(path)
    with pytest.raises(ValueError, match=r"^The checkpoint is damaged: its content does not match its digest"):
        trainer().fit(module, datamodule=moons(), ckpt_path=path, weights_only=True)


def test_a_checkpoint_without_a_digest_is_refused(saved):
    for part in ("digest", "covers"):
        changed(saved[1], lambda c, part=part: c["ksm_lightning"].pop(part), is_sealed=False)
        with pytest.raises(ValueError, match=r"x.ckpt is refused: it has no digest, so it is damaged or was edited"):
            read_checkpoint(saved[1])
        changed(saved[1], lambda c: None)
    changed(saved[1], lambda c: c["ksm_lightning"]["covers"].remove("loops"), is_sealed=False)
    with pytest.raises(ValueError, match="has no digest"):
        read_checkpoint(saved[1])


class OwnKeys(KernelSimilarityMatching):
    """A user's module that adds a key of its own, as Lightning's documentation shows."""

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["mine"] = {"notes": [1, 2]}


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_checkpoints_of_lightnings_callback_and_with_own_keys_match_their_digest(tmp_path):
    torch.manual_seed(0)
    module = OwnKeys(num_neurons=6, in_features=2, kernel_params={"sigma": 0.3}, init="normal", phases=SHORT)
    save = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    stop = EarlyStopping("val/energy", patience=100)
    run = trainer([save, stop], enable_checkpointing=True)
    run.fit(module, datamodule=moons())
    for updates in (5, 10):
        content = read_checkpoint(tmp_path / f"step={updates}.ckpt")
        assert (content["global_step"], content["mine"]) == (updates, {"notes": [1, 2]})
        assert {name.partition("{")[0] for name in content["callbacks"]} == {"ModelCheckpoint", "EarlyStopping"}
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert set(read_checkpoint(tmp_path / "weights.ckpt")["state_dict"]) == {"network.W", "network.q", "network.L"}


def test_a_checkpoint_of_another_lightning_version_continues(saved):
    """Lightning replaces the version in what it loads, which the digest must survive."""
    changed(saved[1], lambda c: c.update({"pytorch-lightning_version": "2.5.0"}))
    fit_again = trainer(max_steps=10)
    fit_again.fit(model(), datamodule=moons(), ckpt_path=saved[1], weights_only=True)
    assert fit_again.global_step == 10


def test_the_digest_of_a_large_checkpoint_is_cheap():
    """W, L, the tracked inverse and a copy of the weights of 800 neurons on MNIST: 10 MB."""
    n, m = 800, 400
    weights = {"W": torch.zeros(n, m), "q": torch.zeros(n), "L": torch.zeros(n, n)}
    content = {"state_dict": weights, "copy": dict(weights), "inverse": torch.zeros(n, n)}
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        digest_of(content)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05


def test_the_digest_of_an_expanded_tensor_needs_no_copy():
    huge = torch.zeros(1).expand(2**40)  # 4 TB if it were copied
    assert digest_of(huge) == digest_of(torch.zeros(1).expand(2**40))
    assert len({digest_of(huge), digest_of(torch.zeros(1).expand(2**41)), digest_of(torch.ones(1).expand(2**40))}) == 3


def test_the_digest_of_a_tensor_does_not_depend_on_its_memory_layout():
    x = torch.arange(12.0).reshape(3, 4)
    assert digest_of(x.mT.contiguous().mT) == digest_of(x) == digest_of(torch.nn.Parameter(x))
    assert len({digest_of(each) for each in (x, x.mT, x.flatten(), x.double(), x.bfloat16(), x.int(), x + 1)}) == 7


@pytest.fixture
def saved_tight(tmp_path):
    """A checkpoint in the middle of a run, with the running mean of the rule; n = 6, p = 9, m = 2."""
    module = model(bound="tight", num_landmarks=9, phases=None, updates=20)
    fit(module, max_steps=12).save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    return module, tmp_path / "x.ckpt"


def test_a_tight_checkpoint_holds_tensors_that_load_with_weights_only(saved_tight):
    module, path = saved_tight
    content = torch.load(path, weights_only=True)
    assert {name: tuple(value.shape) for name, value in content["state_dict"].items()} == {
        "network.W": (9, 2), "network.Q": (6, 9), "network.L": (6, 6)
    }  # fmt: skip
    assert (content["hyper_parameters"]["bound"], content["hyper_parameters"]["num_landmarks"]) == ("tight", 9)
    learner = content["ksm_lightning"]["learner"]
    assert learner["rule"]["square"].shape == (9,)
    assert learner["rule"]["steps"] > 0
    x = torch.randn(5, 2)
    loaded = KernelSimilarityMatching.load_from_checkpoint(path)
    assert torch.equal(loaded(x), module(x))


def part_changed(path, part, **values):
    """Replace values of a part of the learner's state."""
    changed(path, lambda content: content["ksm_lightning"]["learner"][part].update(values))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda p: changed(p, lambda c: c["state_dict"].update({"network.Q": torch.zeros(6, 8)})),
            r"network.Q should be \(6, 9\) and is \(6, 8\)",
        ),
        (lambda p: changed(p, lambda c: c["state_dict"].pop("network.Q")), r"network.Q should be \(6, 9\) and is None"),
        (
            lambda p: changed(p, lambda c: c["hyper_parameters"].update(num_landmarks=10)),
            "its state of the rule does not fit the network",
        ),
        (
            lambda p: changed(p, lambda c: c["hyper_parameters"].update(num_landmarks=5)),
            "`num_landmarks` must be at least the number of neurons, 6, got 5",
        ),
        (lambda p: part_changed(p, "rule", square=torch.zeros(9, 2)), "its state of the rule does not fit the network"),
        (lambda p: part_changed(p, "rule", steps=float("nan")), "its state of the rule does not fit the network"),
        (lambda p: part_changed(p, "rule", steps="3"), "its state of the rule does not fit the network"),
    ],
)
def test_a_damaged_tight_checkpoint_is_refused_in_one_sentence(saved_tight, spoil, message):
    spoil(saved_tight[1])
    with pytest.raises(ValueError, match=message) as caught:
        KernelSimilarityMatching.load_from_checkpoint(saved_tight[1])
    assert "\n" not in str(caught.value)


def test_loading_imports_nothing_that_the_file_names(saved, tmp_path):
    """A checkpoint that names a module in the working folder does not cause its import."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    changed(saved[1], lambda c: c["hyper_parameters"].update(kernel="evil.Kernel"))
    code = (
        "from ksm_lightning.module import KernelSimilarityMatching as K; import sys\n"
        f"try: K.load_from_checkpoint({str(saved[1])!r})\n"
        "except ValueError as error: print('refused', 'evil' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert result.stdout.strip() == "refused False"


def test_a_users_kernel_is_loaded_if_it_is_registered(tmp_path):
    @register_kernel("test_mine")
    class Mine(GaussianKernel):
        pass

    fit(module := model(kernel="test_mine", phases=SHORT)).save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    loaded = KernelSimilarityMatching.load_from_checkpoint(tmp_path / "x.ckpt")
    assert isinstance(loaded.network.kernel, Mine)
    del registry._KERNELS["test_mine"]
    with pytest.raises(ValueError, match="import the module that defines it"):
        KernelSimilarityMatching.load_from_checkpoint(tmp_path / "x.ckpt")
    assert module.kernel.sigma == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kernel": "laplacian"},
            "has kernel=gaussian, but the model has laplacian: remove `kernel`, or train",
        ),
        ({"kernel_params": {"sigma": 0.4}}, "has kernel_params=.*0.3.*0.4"),
        ({"ridge": 0.1}, "has ridge=0.001, but the model has 0.1"),
        ({"num_neurons": 7}, "has num_neurons=6, but the model has 7"),
        ({"bound": "tight", "phases": None}, "has bound=paper, but the model has tight: remove `bound`"),
    ],
)
@pytest.mark.parametrize("function", ["fit", "validate"])
def test_a_trainer_refuses_the_checkpoint_of_another_network(saved, options, message, function):
    with pytest.raises(ValueError, match=message):
        getattr(trainer(), function)(model(**options), datamodule=moons(), ckpt_path=saved[1], weights_only=True)


def test_loading_with_another_ridge_is_refused(saved):
    with pytest.raises(ValueError, match=r"has ridge=0.001, but the model has 0.1"):
        KernelSimilarityMatching.load_from_checkpoint(saved[1], ridge=0.1)


def test_the_ridge_comes_from_the_checkpoint(tmp_path):
    """The adaptive schedule chooses the ridge from the data and the seed, which a resumed run may not have."""

    def own():
        return model(kernel="power_cosine", kernel_params={"alpha": 2}, phases=None, updates=60, in_features=2)

    x = moons().train_points.data
    whole, first, rest, seen = own(), own(), own(), own()
    loader = DataLoader(TensorDataset(x), batch_size=len(x))
    trainer(log_every_n_steps=1).fit(whole, loader)
    run = trainer(max_steps=20, log_every_n_steps=1)
    run.fit(first, loader)
    run.save_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    trainer(log_every_n_steps=1).fit(rest, loader, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert rest.network.ridge == whole.network.ridge != 1e-3
    assert torch.equal(rest.network.W, whole.network.W)
    torch.manual_seed(99)
    trainer().validate(seen, datamodule=moons(), ckpt_path=tmp_path / "x.ckpt", weights_only=True, verbose=False)
    assert seen.network.ridge == seen.hparams["ridge"] == whole.network.ridge
