"""Content of the event files of TensorBoard."""

from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from kerple.measure.extrapolation import Extrapolation
from kerple.training.dashboards import Dashboards
from tests.toy import RandomText, small_model, trainer


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[EventAccumulator, dict[str, torch.Tensor]]]:
    """The events of a fit of four steps and of a test, and the last logged values."""
    read, checkpoint = {}, tmp_path_factory.mktemp("run") / "checkpoints/last.ckpt"
    options = {"max_steps": 4, "val_check_interval": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    for stage in ("fit", "test"):
        folder = checkpoint.parents[1] / ("test" if stage == "test" else "")
        run = trainer(folder, Dashboards(), Extrapolation([8]), events=True, enable_checkpointing=False, **options)
        ckpt_path = checkpoint if stage == "test" else None
        getattr(run, stage)(small_model(lr=0.1), RandomText(vocabulary=11), ckpt_path=ckpt_path, weights_only=False)
        if stage == "fit":
            run.save_checkpoint(checkpoint)
        run.logger.finalize("success")
        accumulator = EventAccumulator(str(folder), {"tensors": 0, "scalars": 0, "histograms": 0}).Reload()
        read[stage] = accumulator, run.callback_metrics
    return read


def test_parameters_of_the_strategy_are_histograms_at_each_validation(events: dict) -> None:
    assert set(events["fit"][0].Tags()["histograms"]) == {"kernels/r1", "kernels/r2"}
    histograms = events["fit"][0].Histograms("kernels/r2")
    assert [event.step for event in histograms] == [0, 2, 4]
    assert all(event.histogram_value.num == 2 for event in histograms)  # 2 heads


@pytest.mark.parametrize(("stage", "metric"), [("fit", "val/loss"), ("test", "test/ppl/full/8")])
def test_hparams_contain_settings_and_final_metrics(events: dict, stage: str, metric: str) -> None:
    accumulator, logged = events[stage]

    def data(tag: str) -> Any:
        content = accumulator.summary_metadata[f"_hparams_/{tag}"].plugin_data.content
        return plugin_data_pb2.HParamsPluginData.FromString(content)

    assert metric in {info.name.tag for info in data("experiment").experiment.metric_infos}
    settings = data("session_start_info").session_start_info.hparams
    assert settings["1 strategy"].string_value == "KerpleLog"
    assert settings["3 lr"].number_value == 0.1
    assert settings["5 position_parameters"].number_value == 4
    # TensorBoard shows the first five
    numbers = "12345" if stage == "fit" else "1235"  # a test has no max_steps
    assert [name[0] for name in sorted(settings)[: len(numbers) + 1]] == [*numbers, "a"]
    assert "position" not in settings  # a function is not a hyper-parameter
    assert accumulator.Scalars(metric)[-1].value == pytest.approx(float(logged[metric]))


def test_a_fit_and_the_test_of_its_checkpoint_are_one_row_of_hparams(events: dict) -> None:
    contents = [
        accumulator.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        for accumulator, _ in events.values()
    ]
    groups = [plugin_data_pb2.HParamsPluginData.FromString(c).session_start_info.group_name for c in contents]
    assert groups[0] == groups[1] != ""
