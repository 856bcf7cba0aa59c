"""`python run.py predict`, on a task and on text."""

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models

from kerple.cli.continuation import pieces
from kerple.cli.main import main
from kerple.cli.trained import load
from kerple.tasks import TaskData
from tests.cli.tiny import complaint
from tests.toy import QUIET

TRAINER = QUIET | {"max_steps": 60, "gradient_clip_val": 1.0, "limit_val_batches": 0}
MODEL = {"position": "ALiBi", "layers": 2, "dim": 32, "heads": 2, "lr": 1e-2, "init": 0.15, "warmup": 0.1}


@pytest.mark.filterwarnings("ignore")
def test_a_trained_model_answers_and_stops(tmp_path, capsys):
    task = {"class_path": "kerple.tasks.Copy", "init_args": {"repeated": True, "symbols": 2}}
    settings = {"task": task, "train_length": 1, "test_lengths": [2], "length": 4, "held_out": 0.01, "batch_size": 8}
    config = {"model": MODEL, "trainer": TRAINER, "run_dir": str(tmp_path / "run")}
    config["data"] = {"class_path": "kerple.tasks.TaskData", "init_args": settings}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(tmp_path / "run.yaml")])
    checkpoint = f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    capsys.readouterr()
    for letter in "ab":
        main(["predict", checkpoint, "--prompt", f"{letter}="])
        assert capsys.readouterr().out == f"{letter}={letter}\n"

    model, data = load(checkpoint.partition("=")[2])
    assert isinstance(data, TaskData)
    assert not model.training
    assert "the character 'ß'" in complaint(capsys, "predict", checkpoint, "--prompt", "ß=")
    with pytest.raises(SystemExit):
        main(["predict", checkpoint, "--prompt", "a=", "--temperature=-1"])
    printed = capsys.readouterr()
    assert "temperature: got -1" in printed.err
    assert not printed.out  # nothing is printed before it is known that something can follow


def test_pieces_never_end_inside_a_character():
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

    text = "für δ: 日本"
    streamed = list(pieces(Bytes(), [65], iter([*text.encode(), 0, 65]), end=0))
    assert streamed == list(text)  # the end token and what follows are not shown
    assert list(pieces(Bytes(), [65], iter("é".encode()[:1]), end=0)) == ["\N{REPLACEMENT CHARACTER}"]


def test_pieces_keep_the_spaces_that_a_tokenizer_drops_at_the_start_of_a_text():
    words = ["</s>", "▁all", "▁", "▁work", "s"]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(5), strict=True)), "</s>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    for prompt in [0], [1], [1, 2]:
        new = [3, 4, 2, 2, 1, 3]
        streamed = pieces(tokenizer, prompt, iter([*new, 0]), end=0)
        assert tokenizer.decode(prompt) + "".join(streamed) == tokenizer.decode(prompt + new)
