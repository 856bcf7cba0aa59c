"""Writes results/families/retrofit.md from tiny random models: ``python -m docs.retrofit_families``."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kerple.base.errors import UserError
from kerple.hf import retrofit
from kerple.hf.position_limit import takes_positions
from kerple.hf.windowed_attention import attention_replaced, decoder, layer_kinds
from kerple.positions import KerpleLog
from tests.hf.tiny import CONFIGS, GROUPED, LENGTH, hf, text, tiny

PAGE = Path(__file__).parents[1] / "results/families/retrofit.md"
MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 16}
MORE = {
    **{name: {} for name in ("gemma", "olmo", "granite", "stablelm", "phi", "starcoder2", "cohere", "glm", "glm4")},
    **{name: {} for name in ("nemotron", "exaone4", "arcee", "seed_oss", "apertus")},
    **{name: {"head_dim": 8} for name in ("helium", "ministral", "hunyuan_v1_dense")},
    "gemma2": {"head_dim": 8},
    "mixtral": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": MOE | {"head_dim": 8},
    "olmoe": MOE,
    "gpt_oss": MOE | {"head_dim": 8, "sliding_window": 7},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 2 * LENGTH},
    "falcon": {},
    "mpt": {},
    "llama4_text": MOE | {"head_dim": 8},
    "deepseek_v3": MOE | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "qwen3_next": MOE | {"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
}
"""Families that are not in `tests.hf.tiny`, and their sizes."""


def build(family: str) -> Any:
    """Return a tiny random model of a family."""
    if family in CONFIGS:
        return tiny(family, **({"max_position_embeddings": LENGTH} if family == "bloom" else {}))
    config = hf.CONFIG_MAPPING[family](**GROUPED | {"num_hidden_layers": 4} | MORE[family])
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def loop(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attention with the bias ``-r1 · log(1 + r2 · d)``, query by query and head by head in fp64."""
    r1, r2 = (rate.double() for rate in loop.rates)  # type: ignore[attr-defined]
    out = torch.empty_like(query, dtype=torch.float64)
    window = options.get("sliding_window")
    for head in range(query.shape[1]):
        group = head * key.shape[1] // query.shape[1]
        for m in range(query.shape[2]):
            first = max(0, m - window + 1) if window else 0
            distance = m - torch.arange(first, m + 1).double()
            scores = torch.einsum("bd,bnd->bn", query[:, head, m].double(), key[:, group, first : m + 1].double())
            scores = scores * scaling - r1[head] * torch.log1p(r2[head] * distance)
            if (sinks := options.get("s_aux")) is not None:
                scores = torch.cat([scores, sinks[head].double().expand(len(scores), 1)], 1)
            p = scores.softmax(-1)[:, : m + 1 - first]
            out[:, head, m] = torch.einsum("bn,bnd->bd", p, value[:, group, first : m + 1].double())
    return out.transpose(1, 2).to(query.dtype), None


def gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the loss by the names of the parameters."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = model(tokens, labels=tokens, use_cache=False).loss
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Tensor:
    """Return the largest difference of a gradient, relative to the largest gradient of its parameter.

    Parameters whose gradients are below 1e-6 of the largest one are left out: they are rounding errors, as those of the
    biases of keys.
    """
    assert found.keys() == expected.keys()
    sizes = {name: gradient.abs().max() for name, gradient in expected.items()}
    names = [name for name, size in sizes.items() if size > 1e-6 * max(sizes.values())]
    return torch.stack([(found[name] - expected[name]).abs().max() / sizes[name] for name in names]).max()


def row(family: str) -> list[str]:
    """Return the cells of a family: its class, and the largest errors of its logits and gradients."""
    model, tokens = build(family), text(2, LENGTH)
    name = type(model).__name__
    try:
        retrofit(model, KerpleLog)
    except UserError as error:
        return [name, "no", "", "", "", "", str(error).partition(", expected")[0].removeprefix("model: ")]
    position = decoder(model).kerple.positions[0]
    loop.rates = position.r1, position.r2  # type: ignore[attr-defined]
    found = gradients(model, tokens)
    with attention_replaced(model, "kerple_loop", loop):
        differences = [gradient_error(found, gradients(model, tokens))]
        with torch.no_grad():
            expected = model(tokens).logits
    with torch.no_grad():
        differences = [*logit_errors(model, tokens, expected), *differences]
    errors = [f"{float(e):.0e}" for e in differences]
    kinds = sorted({kind.partition("_")[0] for kind in layer_kinds(model.config)})
    return [name, "yes", *errors, ", ".join(kinds)]


def logit_errors(model: Any, tokens: Tensor, expected: Tensor) -> list[Tensor]:
    """Return the largest errors of logits, of logits with a cache, and of logits after padding."""
    logits = model(tokens).logits
    cache = model(tokens[:, :20], use_cache=True).cache
    cached = torch.cat([model(tokens[:, :20]).logits, model(tokens[:, 20:], cache=cache).logits], 1)
    mask = torch.ones(2, LENGTH + 5, dtype=torch.int64)
    mask[:, :5] = 0
    padded = model(torch.cat([text(2, 5, seed=2), tokens], 1), attention_mask=mask).logits[:, 5:]
    errors = [(logits - expected).abs().max(), (cached - logits).abs().max(), (padded - logits).abs().max()]
    if takes_positions(model):
        # without a bias and the model's own positions, gaps in the positions change nothing
        decoder(model).kerple.positions[0].r1.zero_()
        gaps = torch.arange(LENGTH) + 7 * (torch.arange(LENGTH) >= 9)
        moved = model(tokens, position_ids=gaps[None]).logits - model(tokens).logits
        errors[0] = torch.maximum(errors[0], moved.abs().max())
    return errors


def main() -> None:
    """Write the table of the page. The text above the table is kept."""
    lines = [
        "| model | works | error | cached | padded | gradients | kinds of layers, or reason |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for family in [*CONFIGS, *MORE]:
        try:
            cells = row(family)
        except Exception as error:  # the row states what is wrong
            cells = [family, "not tested", "", "", "", "", f"{type(error).__name__}: {str(error).splitlines()[0]:.90}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text_above = PAGE.read_text("utf-8").partition("\n| ")[0]
    page = "\n".join([text_above, *lines, ""])
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
