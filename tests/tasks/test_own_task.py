"""The page on a task of one's own: its code, put where it says, does what it says."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kerple.cli.main import main
from kerple.tasks.vocabulary import encode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/own-task.md").read_text()


@pytest.fixture
def my_task(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_task")
    sys.modules.pop("my_task", None)


def test_its_problems_and_places_are_what_the_page_says(my_task):
    task = my_task.Rotate()
    rng = np.random.default_rng(0)
    for n in range(1, 20):
        example = task.example(n, rng)
        assert list(example.answer) == [example.prompt[(i + 1) % n] for i in range(n)]
        tokens = torch.tensor([encode(example.text)])
        whole = task.places(tokens)
        for end in range(1, tokens.shape[1]):
            assert torch.equal(task.places(tokens[:, :end]), whole[:, :end])
        read, written = whole[0, 1 : n + 1], whole[0, n + 2 : 2 * n + 2]
        assert torch.equal(written[:-1], read[1:])  # all letters but the one that moved
    assert task.places(torch.tensor([encode("«cab=abc··")]))[0].tolist() == [0, 2, 3, 4, 2, 3, 4, 5, 0, 0]


@pytest.mark.filterwarnings("ignore")
def test_the_commands_of_the_page_run(my_task, capsys):
    lines = PAGE.replace("\\\n", "").splitlines()
    commands = [line.split()[2:] for line in lines if line.startswith("    python run.py ")]
    fit, test, predict = ([part.strip('"').replace("configs/", f"{ROOT}/configs/") for part in c] for c in commands)
    fit += ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    fit += ["--data.batch_size=4", "--data.validation_examples=8", "--data.test_examples=4"]
    with pytest.raises(SystemExit):  # a length that is too small, as the page says
        main([*fit, "--data.length=13"])
    assert "set it to 14 or more" in capsys.readouterr().err
    main(fit)  # into the folder that the page names, though the first attempt had chosen it too
    main(test)
    assert len(list(Path("logs/tasks/Coupled/seed-1235").glob("**/results.csv.gz"))) == 1
    capsys.readouterr()
    main([*predict, "--tokens", "5", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("cab=")
