"""What the event files hold, and what a browser shows of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.utils.data import DataLoader

from kerple.positions import build
from kerple.training.dashboards import Dashboards
from tests.toy import ToyData, small_model, trainer

CURVES = {"full": {64: 18.5, 128: 17.9, 256: 17.4}, "windowed64": {64: 18.5, 128: 18.2, 256: 18.1}}


class Model(LightningModule):
    def __init__(self, lr: float = 0.1, layers: int = 3, position: Any = print) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.position = build("KerpleLog", dim=8, heads=2, length=64)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.position.bias(torch.arange(8.0)).sum()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val/loss", torch.tensor(3.5))

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        for protocol, curve in CURVES.items():
            for length, value in curve.items():
                self.log(f"test/ppl/{protocol}/{length}", torch.tensor(value))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EventAccumulator]:
    """What TensorBoard reads of a fit of four steps and of a test."""
    loader, read = DataLoader(torch.zeros(4, 1)), {}
    options = {"max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    for stage in ("fit", "test"):
        folder = tmp_path_factory.mktemp(stage)
        run = trainer(folder, Dashboards(), events=True, enable_checkpointing=False, **options)
        run.fit(Model(), loader, loader) if stage == "fit" else run.test(Model(), loader, verbose=False)
        run.logger.finalize("success")
        read[stage] = EventAccumulator(str(folder), {"tensors": 0, "scalars": 0, "histograms": 0}).Reload()
    return read


def test_nothing_that_smoothing_could_falsify_is_a_scalar_over_length(events: dict[str, EventAccumulator]) -> None:
    for name in events["test"].Tags()["scalars"]:
        assert len({event.step for event in events["test"].Scalars(name)}) == 1, name  # nothing to smooth


def test_the_custom_scalars_page_has_the_course_of_a_fit(events: dict[str, EventAccumulator]) -> None:
    tensor = events["fit"].Tensors("custom_scalars__config__")[0].tensor_proto
    (training,) = Layout.FromString(tensor.string_val[0]).category
    assert training.title == "training"
    assert list(training.chart[0].multiline.tag) == ["train/loss", "val/loss"]
    assert "custom_scalars__config__" not in events["test"].Tags()["tensors"]


def test_a_sample_of_text_is_what_the_model_would_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyData, "decode", lambda _, tokens: " ".join(str(int(t)) for t in tokens), raising=False)
    model = small_model()
    options = {"max_steps": 2, "val_check_interval": 2, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    run = trainer(tmp_path, Dashboards(), events=True, **options)
    run.fit(model, datamodule=ToyData())
    run.logger.finalize("success")
    (sample,) = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload().Tensors("sample/text_summary")
    tokens = [0, 1, 2, 3]  # half of the segment of 8, counted
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(model.eval().network(torch.tensor([tokens]))[0, -1].argmax()))
    text = f"given:\n\n    0 1 2 3\n\ncontinued:\n\n     {' '.join(map(str, tokens[4:]))}"
    assert (sample.step, sample.tensor_proto.string_val[0].decode()) == (2, text)


def test_kernels_are_histograms_at_each_validation(events: dict[str, EventAccumulator]) -> None:
    assert set(events["fit"].Tags()["histograms"]) == {"kernels/r1", "kernels/r2"}
    histograms = events["fit"].Histograms("kernels/r2")
    assert [event.step for event in histograms] == [0, 2, 4]
    assert all(event.histogram_value.num == 2 for event in histograms)  # 2 heads


@pytest.mark.parametrize(("stage", "metric", "value"), [("fit", "val/loss", 3.5), ("test", "test/ppl/full/256", 17.4)])
def test_hparams_hold_settings_and_final_metrics(events: dict, stage: str, metric: str, value: float) -> None:
    def data(tag: str) -> Any:
        content = events[stage].summary_metadata[f"_hparams_/{tag}"].plugin_data.content
        return plugin_data_pb2.HParamsPluginData.FromString(content)

    assert metric in {info.name.tag for info in data("experiment").experiment.metric_infos}
    settings = data("session_start_info").session_start_info.hparams
    assert [info.name for info in data("experiment").experiment.hparam_infos][:2] == ["1 strategy", "2 seed"]
    assert settings["1 strategy"].string_value == "KerpleLog"
    assert settings["lr"].number_value == 0.1
    assert settings["position_parameters"].number_value == 4
    assert "position" not in settings  # a function is no hyper-parameter
    assert events[stage].Scalars(metric)[-1].value == pytest.approx(value)
