"""Steps and validations do not depend on the division of the batch by accumulation, devices and shards."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, seed_everything
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch import Tensor
from torch.utils.data import DataLoader

from kerple.measure.task_accuracy import TaskAccuracy
from kerple.model import Batch
from kerple.positions import ALiBi, KerpleLog, Position
from kerple.tasks import Addition, TaskData
from kerple.tasks.task import Example
from kerple.training.language_model import LanguageModel
from kerple.training.sharding import ShardedBlocks, full_tensor
from kerple.training.trainer import AutoTrainer as Trainer
from tests.toy import QUIET, ToyData, small_model

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH = 13
ALONE: dict[str, Any] = QUIET | {"logger": False, "enable_checkpointing": False}


class Kept(LanguageModel):
    """Keeps the unclipped gradient of the last step, the bias of the strategy, and dtypes."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        with self.network.blocks[0].mlp[0].register_forward_pre_hook(self.keep):
            return super().training_step(batch, index)

    @torch.no_grad()
    def keep(self, layer: torch.nn.Module, _: Any) -> None:
        position = self.network.positions[0]
        self.table = position.bias(torch.arange(9.0))
        self.dtypes = sorted({str(x.dtype) for x in [*position.parameters(), *position.buffers()]})
        self.dtype_of_block = str(layer.weight.dtype)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.gradient = {n: full_tensor(p.grad).clone() for n, p in self.named_parameters()}
        super().configure_gradient_clipping(*args, **kwargs)


class Forked(_MultiProcessingLauncher):
    """Does not copy weights to the main process, which would get only the first shard."""

    def _recover_results_in_main_process(self, *_: Any) -> None: ...


class Sharded(ShardedBlocks):
    """The strategy of configs/trainer/fsdp.yaml in forked processes."""

    def _configure_launcher(self) -> None:
        self._launcher = Forked(self, start_method="fork")


class Write(Callback):
    """Writes the attributes that `Kept` keeps, and the logged values, to a file on rank 0."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: Trainer, pl_module: Kept) -> None:
        logged = {k: v for k, v in trainer.callback_metrics.items() if isinstance(v, Tensor)}
        if trainer.is_global_zero:
            of_module = {name: getattr(pl_module, name) for name in ("gradient", "table", "dtypes", "dtype_of_block")}
            torch.save(logged | of_module, self.file)


def model(position: type[Position] = KerpleLog, optimizer: Any = "adamw", **options: Any) -> Kept:
    seed_everything(0, verbose=False)
    vocabulary = TaskData(Addition(), LENGTH, 3).vocabulary
    return Kept(position, vocabulary, LENGTH, **{"layers": 1, "dim": 16, "heads": 2, "optimizer": optimizer} | options)


def data(batch_size: int) -> TaskData:
    # validation has 3 batches, so two processes need a filler, which evens out their numbers of batches
    return TaskData(Addition(), LENGTH, 3, batch_size=batch_size, eval_batch_size=7, validation_examples=20, seed=3)


def step(
    folder: Path, batch_size: int, accumulate: int = 1, processes: int = 1, sharded: bool = False, **options: Any
) -> dict[str, Any]:
    """Return gradient and logs of one step over the first batch_size · accumulate · processes problems."""
    folder.mkdir(exist_ok=True)
    settings = {name: options.pop(name) for name in ("layers", "checkpoint_activations", "tied") if name in options}
    module = model(options.pop("position", KerpleLog), options.pop("optimizer", "adamw"), **settings)
    module.lr = 1e-12  # the validation after the step must have the same weights
    trainer = Trainer(
        **ALONE, max_steps=1, accumulate_grad_batches=accumulate, devices=processes, default_root_dir=folder,
        strategy=Sharded() if sharded else "ddp_fork" if processes > 1 else "auto", num_sanity_val_steps=0,
        callbacks=[Write(folder / "logged.pt"), *([] if sharded else [TaskAccuracy()])], log_every_n_steps=1,
        val_check_interval=accumulate, check_val_every_n_epoch=None, **options,
    )  # fmt: skip
    trainer.fit(module, data(batch_size))
    return torch.load(folder / "logged.pt", weights_only=True)


def by_hand(problems: Iterable[Example], **options: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over the tokens of all answers and its gradient, one problem at a time without padding."""
    network = model(**options).network
    losses = [network.losses(torch.tensor([p.tokens()]))[0][torch.tensor(p.scored())] for p in problems]
    (mean := torch.cat(losses).mean()).backward()
    return float(mean), {f"network.{n}": p.grad for n, p in network.named_parameters()}


def test_a_last_step_with_fewer_micro_batches_has_the_gradient_of_their_mean() -> None:
    """With three micro-batches and two per step, the second step has one."""
    generator = torch.Generator().manual_seed(0)
    text = [{"tokens": torch.randint(12, (2, LENGTH + 1), generator=generator)} for _ in range(3)]
    trainer, ours = Trainer(**ALONE, max_steps=2, accumulate_grad_batches=2), model()
    ours.lr = 1e-12  # so that both steps have the same weights
    trainer.fit(ours, DataLoader(text, batch_size=None))
    expected = model()
    expected.network.losses(text[2]["tokens"]).mean().backward()
    gradient = {name: parameter.grad for name, parameter in expected.named_parameters()}
    torch.testing.assert_close(ours.gradient, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "processes", "sharded"), [(4, 2, 1, False), (2, 2, 2, False), (2, 2, 2, True)]
)
def test_the_gradient_is_that_of_the_mean_loss_of_the_global_batch(
    tmp_path: Path, batch_size: int, accumulate: int, processes: int, sharded: bool
) -> None:
    loss, gradient = by_hand(map(partial(data(1).sampler.training_problem, 3), range(8)))
    logged = step(tmp_path, batch_size, accumulate, processes, sharded)
    assert float(logged["train/loss"]) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(logged["gradient"], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("sharded", [False, True])
def test_activation_checkpointing_keeps_the_gradient_with_several_processes(
    tmp_path: Path, sharded: bool, precision: Any
) -> None:
    plain, checkpointed = (
        step(tmp_path / str(c), 2, 2, 2, sharded, layers=3, checkpoint_activations=c, precision=precision)
        for c in (False, True)
    )
    for name, expected in plain["gradient"].items():
        assert torch.equal(checkpointed["gradient"][name], expected), name


@pytest.mark.parametrize("position", [KerpleLog, ALiBi])
def test_strategies_stay_in_fp32_if_blocks_are_gathered_in_bf16(tmp_path: Path, position: type[Position]) -> None:
    """Lightning's FSDP with bf16-mixed rounds parameters and buffers to bf16."""
    options = {"position": position, "precision": "bf16-mixed"}
    one = step(tmp_path / "one", 4, accumulate=2, **options)
    two = step(tmp_path / "two", 2, accumulate=2, processes=2, sharded=True, **options)
    assert (one["dtype_of_block"], two["dtype_of_block"]) == ("torch.float32", "torch.bfloat16")
    assert one["dtypes"] == two["dtypes"] == ["torch.float32"]
    assert torch.equal(one["table"], two["table"])
    assert one["gradient"].keys() == two["gradient"].keys()
    for name, expected in one["gradient"].items():  # bf16 rounds the gradients differently
        assert (two["gradient"][name] - expected).norm() < 0.02 * expected.norm(), name


def test_muon_is_refused_with_sharded_matrices(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"model\.optimizer: got muon, which does not support sharded parameters"):
        step(tmp_path, 4, sharded=True, optimizer="muon")


def test_the_validation_loss_does_not_include_fillers(tmp_path: Path) -> None:
    one, two = (step(tmp_path / str(n), 8 // n, processes=n, tied=True) for n in (1, 2))
    assert two["val/loss"] == pytest.approx(float(one["val/loss"]), rel=1e-7)
    for name in ("val/exact_match", "val/token_accuracy"):
        assert two[name] == one[name]
    assert one["val/token_accuracy"] > 0  # with tied weights, digits that are repeated are predicted
    assert float(one["val/loss"]) == pytest.approx(by_hand(data(1).validation_problems, tied=True)[0], rel=1e-5)


def test_a_step_without_targets_does_not_change_weights() -> None:
    ours, unscored = model(), {"tokens": torch.ones(2, LENGTH + 1, dtype=torch.long)}
    unscored["scored"] = torch.zeros(2, LENGTH, dtype=torch.bool)
    Trainer(**ALONE, max_steps=3).fit(ours, DataLoader([unscored] * 3, batch_size=None))
    assert all(map(torch.equal, ours.parameters(), model().parameters()))


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    norms = []
    for scale in (1.0, 2.0**12):
        module = small_model("KerpleLog", lr=0.01)
        # Lightning refuses fp16 on a CPU, but its plugin and torch's scaler work
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        trainer = Trainer(**ALONE, max_steps=3, limit_val_batches=0, gradient_clip_val=1.0, plugins=[plugin])
        trainer.fit(module, ToyData())
        norms.append(float(trainer.callback_metrics["train/gradient_norm"]))
        assert trainer.precision == "16-mixed"
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
