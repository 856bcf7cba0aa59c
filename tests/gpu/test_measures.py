"""Measures, generation and retrofitted models on a GPU, against fp32 on the CPU."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kerple.data.evaluation_text import Text
from kerple.data.tokenizer import train_tokenizer
from kerple.measure.far_context import FarContext
from kerple.measure.gap import GapCurve
from kerple.measure.measure import Measure
from kerple.measure.needle import Needle
from kerple.measure.protocols import full, sliding, windowed
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.model.generation import generate
from kerple.model.network import SupportsGeneration
from kerple.positions import KerpleLog, Shape, strategies
from kerple.positions.visibility import Visibility

# of the norm of an error, relative to that of the losses (for protocols: of their differences from the mean)
TOLERANCE = {"bf16-mixed": 2e-2, "16-mixed": 4e-3}
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LENGTH = 64
PROTOCOLS: dict[str, Callable[[Transformer, Tensor], Tensor]] = {
    "full": lambda network, tokens: full(network, tokens, 2 * LENGTH),
    "windowed": lambda network, tokens: windowed(network, tokens, 2 * LENGTH, Visibility(LENGTH)),
    "keep_first": lambda network, tokens: windowed(network, tokens, 2 * LENGTH, Visibility(LENGTH, first_keys=4)),
    "sliding": lambda network, tokens: sliding(network, tokens, LENGTH, stride=16),
}


def network_and_tokens(name: str) -> tuple[Transformer, Tensor]:
    network = Transformer(Shape(64, 4, LENGTH), 2, 100, strategies()[name], init=0.1).eval()
    return network, torch.randint(100, (8 * 4 * LENGTH,))


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_protocols_have_the_losses_of_fp32_on_the_cpu(protocol: str, precision: str, device) -> None:
    network, tokens = network_and_tokens("KerpleLog")
    tokens = tokens[: 2 * (4 * LENGTH + 1)].view(2, -1)
    with torch.no_grad():
        expected = PROTOCOLS[protocol](network, tokens)
        with torch.autocast(device.type, DTYPES[precision]):
            losses = PROTOCOLS[protocol](deepcopy(network).to(device), tokens.to(device)).cpu()
    assert losses.dtype == torch.float32
    assert (losses - expected).norm() <= TOLERANCE[precision] * (expected - expected.mean()).norm()


MEASURES = [FarContext([2 * LENGTH, 4 * LENGTH - 1], k=8), GapCurve(context=LENGTH, k=16, blocks=4)]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_measures_have_the_sums_of_fp32_on_the_cpu(measure: Measure, precision: str, device) -> None:
    network, tokens = network_and_tokens("KerpleLog")
    text, sums = Text(tokens, begins=list(range(0, len(tokens), 4 * LENGTH))), []
    for kind, of_run in (("cpu", "32-true"), (device.type, precision)):
        with torch.no_grad():
            result = measure.measure(deepcopy(network).to(kind), text, Runner.detect(kind, of_run))
        assert result.about["precision"] == of_run
        sums.append(result.sums)
    expected, ours = sums
    assert [replace(row, sum=0) for row in ours] == [replace(row, sum=0) for row in expected]
    difference = np.subtract(*([row.sum for row in rows] for rows in sums))
    assert np.linalg.norm(difference) <= TOLERANCE[precision] * np.linalg.norm([row.sum for row in expected])


def assert_greedy(network: Transformer, prompt: Tensor, new: Tensor, precision: str) -> None:
    """Assert that fp32 on the CPU chooses the same tokens, or others whose logits differ by a rounding error."""
    with torch.no_grad():
        logits = network(torch.cat([prompt, new], 1))[:, prompt.shape[1] - 1 : -1]
    difference = logits.amax(-1) - logits.gather(-1, new[..., None])[..., 0]
    # a difference of two logits in the tail of the errors; a random token is about 2.5 standard deviations lower
    assert (difference <= 10 * TOLERANCE.get(precision, 1e-6) * logits.std(-1)).all()


@pytest.mark.parametrize("precision", ["32-true", *DTYPES])
@pytest.mark.parametrize("name", ["KerpleLog", "RoPE", "FoX"])
def test_a_cache_continues_a_text_as_a_whole_pass_on_the_cpu_does(name: str, precision: str, device) -> None:
    network, tokens = network_and_tokens(name)
    prompt, runner = tokens[: 2 * LENGTH].view(2, -1), Runner.detect(device.type, precision)
    with runner.autocast():
        new = torch.stack([*generate(deepcopy(network).to(device), prompt.to(device), 6)], 1).cpu()
    assert_greedy(network, prompt, new, precision)


class Answers(SupportsGeneration):
    """A network whose answer to a problem is the second half of the problem. It keeps the continuations."""

    name, training_length = "Answers", LENGTH

    def __init__(self, network: Transformer) -> None:
        self.network = network
        self.continuations: list[tuple[Tensor, list[int]]] = []

    def continued(self, tokens: Tensor, steps: int) -> list[int]:
        self.continuations.append((tokens.cpu(), self.network.continued(tokens, steps)))
        return tokens[0, tokens.shape[1] // 2 :].tolist()


@pytest.mark.parametrize("precision", DTYPES)
def test_needles_are_found_at_the_depths_that_the_answers_contain(precision: str, device) -> None:
    tokenizer = train_tokenizer(["none"], 257)
    network = Transformer(Shape(64, 4, LENGTH), 2, 257, KerpleLog, init=0.1).eval()
    text, answers = Text(torch.arange(2000) % 256, tokenizer=tokenizer), Answers(deepcopy(network).to(device))
    needle = Needle("niah_single_2", lengths=[900], depths=[0.0, 1.0], problems=2)
    result = needle.measure(answers, text, Runner.detect(device.type, precision))
    assert [row["recall"] for row in result.tables[needle.name]] == [0.0, 1.0]
    assert len(answers.continuations) == 4
    for prompt, new in answers.continuations:
        assert_greedy(network, prompt, torch.tensor([new]), precision)


@pytest.mark.parametrize("precision", DTYPES)
def test_extend_has_the_losses_of_fp32_on_the_cpu_with_each_method(precision: str, device, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from kerple.extend.methods import methods  # needs transformers
    from kerple.extend.search import Search
    from tests.hf.tiny import VOCABULARY, configuration, saved

    config, blocks = configuration("llama"), 2
    length, target = config.max_position_embeddings, 4 * config.max_position_embeddings
    text = Text(torch.randint(VOCABULARY, (blocks * (target + 1),)), range(0, blocks * (target + 1), target + 1))
    candidates, _ = methods(config, length, target)
    model, losses = saved(tmp_path / "model", "llama"), []
    for kind, of_run in (("cpu", "32-true"), (device.type, precision)):
        runner, folder = Runner.detect(kind, of_run), tmp_path / of_run
        folder.mkdir()
        search = Search(str(model), candidates, length, target, 0.005, folder, {"test": text}, runner)
        losses.append(np.stack([search.losses(method, "test", target, blocks) for method in candidates]))
    expected, ours = losses
    # twice, because the weights of these models are so large that they amplify rounding errors
    assert np.linalg.norm(ours - expected) <= 2 * TOLERANCE[precision] * np.linalg.norm(expected - expected.mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_retrofitted_models_have_the_logits_and_gradients_of_fp32_on_the_cpu(dtype: torch.dtype, device) -> None:
    pytest.importorskip("transformers")
    from kerple.hf import retrofit  # needs transformers
    from tests.hf.tiny import text, tiny

    model, tokens = retrofit(tiny("llama"), KerpleLog), text(2, 40)
    with torch.no_grad():
        for parameter in model.base_model.kerple.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.3)
    results = []
    for kind, of_run in ((torch.device("cpu"), torch.float32), (device, dtype)):
        copy = deepcopy(model).to(kind)
        with torch.autocast(kind.type, of_run, enabled=of_run != torch.float32):
            out = copy(tokens.to(kind), labels=tokens.to(kind))
        out.loss.backward()
        results.append([out.logits.detach(), *(p.grad for p in copy.base_model.kerple.parameters())])
    for expected, ours in zip(*results, strict=True):
        assert (ours.cpu().float() - expected).norm() <= 3e-2 * expected.norm()


def test_probe_finds_no_fault_in_a_model_on_a_gpu(device) -> None:
    pytest.importorskip("transformers")
    from kerple.probe.probe_model import probe_model
    from tests.hf.tiny import tiny

    model = tiny("llama").to(device)
    report = probe_model(model, model.config)
    assert not report.faults
