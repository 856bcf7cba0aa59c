"""How far a run is, in lines and in its file."""

from pathlib import Path

import pytest
from pytorch_lightning import Trainer

from kerple.base.progress import FILE, read
from kerple.evaluation.progress_lines import ProgressLines, with_progress
from tests.analyses.line import Line
from tests.toy import ToyData


def test_lines_and_the_file_say_how_far_a_fit_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict] = []

    class Read(Line):
        def on_train_batch_start(self, batch: object, index: int) -> None:
            seen.append(read(tmp_path / FILE))

    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, limit_val_batches=0,
        callbacks=[ProgressLines(every=0.0, file_every=0.0)],
    )  # fmt: skip
    model = Read(-1, "loss")
    trainer.fit(model, ToyData())

    assert [told.get("done") for told in seen] == [None, 1, 2, 3]
    last = read(tmp_path / FILE)
    assert (last["doing"], last["done"], last["of"], last["left"]) == ("training", 4, 4, 0)
    for told, weight in zip([*seen[1:], last], model.seen, strict=True):
        assert told["loss"] == pytest.approx(weight**2)
        assert told["left"] == pytest.approx(told["for"] / told["done"] * (4 - told["done"]))
    # 4 rows of 8 targets a step
    assert last["tokens_per_second"] == pytest.approx(4 * 4 * 8 / last["for"])
    printed = [text for text in capsys.readouterr().out.splitlines() if text.startswith("training")]
    assert [text.split(",")[1] for text in printed] == [f" step {n} of 4" for n in (1, 2, 3, 4)]
    assert all("loss" in text and "tokens/s" in text for text in printed)


def test_blocks_that_an_analysis_reads_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[tuple[float, int]] = []

    def state() -> tuple[float, int]:
        content = read(tmp_path / FILE)
        return content["done"], content["of"]

    class Tested(Line):
        def test_step(self, batch: object, index: int) -> None: ...

        def on_test_epoch_end(self) -> None:
            for block in with_progress(self.trainer, range(3)):
                if block:
                    states.append(state())

    Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False, limit_test_batches=2,
        callbacks=[ProgressLines(every=60, file_every=0.0)],
    ).test(Tested(-1, "loss"), ToyData())  # fmt: skip
    assert states == [(1, 3), (2, 3)]
    assert state() == (3, 3)
