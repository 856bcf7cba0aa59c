"""`probe` on a tiny random model of each decoder family of transformers: ``python -m benchmarks.families [FAMILY …]``.

The rows of results/probe/families.md are written, by default for all families without an encoder. A family is listed as
not built if no tiny configuration of it was found here, or if its model is too large or takes no plain tokens.
"""

import inspect
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kerple.base.errors import UserError, describe
from kerple.probe.probe_model import Report, probe_model

PAGE = Path(__file__).parents[1] / "results/probe/families.md"
ENCODERS = {
    *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert"),
    *("data2vec-text", "electra", "ernie", "git", "marian", "mbart", "megatron-bert", "mvp", "pegasus", "plbart"),
    *("prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xmod"),
    *("xlm", "xlm-prophetnet", "xlm-roberta", "xlm-roberta-xl", "xlnet", "qdqbert", "reformer", "transfo-xl"),
    *(
        "musicgen",
        "musicgen_melody",
        "moshi",
        "mllama",
        "blt",
        "fuyu",
        "emu3",
        "gemma3",
        "gemma3n",
        "gemma4",
        "dots3_note",
    ),
}
"""Families of encoders, of decoders that read the output of an encoder, and of models of images or sound."""
LARGEST = 10_000_000  # parameters of the largest model that is built
SECONDS = 120  # longest time for a family
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size", "rotary_dim"), 16),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **{"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 2},
    **{"num_experts_per_tok": 2, "q_lora_rank": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_chunk_size": 8, "mamba_n_groups": 1},
    **{
        "is_decoder": True,
        "sliding_window": 8,
        "attention_window_size": 8,
        "attn_layer_indices": [1, 3],
        "mamba_dt_rank": 4,
    },
}
LIBRARY_FAULTS = {
    **dict.fromkeys(("afmoe", "gpt_oss", "granitemoehybrid", "opt"), "masks without position_ids (transformers#39997)"),
    **dict.fromkeys(
        ("bamba", "falcon_mamba", "mamba", "nemotron_h", "zamba"), "cached Mamba layers (transformers#46741)"
    ),
}
"""Families whose faults are faults of transformers 5.24, and where they are discussed."""


def tiny(family: str) -> Any:
    """Return a random model of a family with the sizes of `SIZES` that its configuration has.

    Raises:
        ValueError: If the model is too large.
    """
    kind = CONFIG_MAPPING[family]
    annotations = {name for parent in kind.__mro__ for name in getattr(parent, "__annotations__", {})}
    known = annotations | set(inspect.signature(kind.__init__).parameters)
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    config = kind(**sizes)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters with these sizes")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights would hide faults
            parameter.add_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
    return model


def row(family: str) -> tuple[str, str]:
    """Return the verdict about a family, and its details."""
    try:
        model = tiny(family)
        with torch.inference_mode():
            model(input_ids=torch.arange(3, 19)[None], use_cache=False)
    except Exception as error:  # families raise errors of many classes for sizes that do not fit
        return "not built", f"{describe(error):.100}"
    try:
        report = probe_model(model, model.config.get_text_config())
    except UserError as error:
        return "not built", f"{error!s:.100}"
    except Exception as error:  # a bug of probe, which the table shows
        return "probe failed", f"{describe(error):.200}"
    return verdict(report), details(report, family)


def verdict(report: Report) -> str:
    """Return ``sound``, ``accused``, ``not judged`` or ``not measured``."""
    counts = Counter(v.verdict for v in report.layers)
    if report.faults:
        return "accused"
    return "sound" if counts["agrees"] else "not judged" if counts["not judged"] else "not measured"


def details(report: Report, family: str) -> str:
    """Return the numbers of layers, and the faults, or the reason why no layer was judged."""
    reasons = list(dict.fromkeys(v.unknown for v in report.layers if v.unknown))
    faults = list(dict.fromkeys(fault.split(": ", 1)[1] if fault[:5] == "layer" else fault for fault in report.faults))
    listed = [LIBRARY_FAULTS[family]] if faults and family in LIBRARY_FAULTS else []
    text = "; ".join([report.outcome.split("; ")[-1], *listed, *faults, *reasons[: 1 if not faults else 0]])
    return text.replace("|", "/").replace("\n", " ")[:260]


def stop(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, stop)
    for family in sys.argv[1:] or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - ENCODERS):
        signal.alarm(SECONDS)
        found = row(family)
        signal.alarm(0)
        print(family, *found, sep=" | ", flush=True)
        earlier = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
        cells = [line.strip("| ").split(" | ") for line in earlier if line.startswith("| ")][1:]
        write_page([*(tuple(old) for old in cells if old[0] != family), (family, *found)])


def write_page(rows: list[tuple[str, ...]]) -> None:
    counts = Counter(found for _, found, _ in rows)
    lines = [
        "# `probe` on the decoder families of transformers",
        "",
        f"Tiny random models, transformers {transformers.__version__}, `python -m benchmarks.families`.",
        f"Sound: {counts['sound']}. Accused: {counts['accused']}. Not judged: {counts['not judged']}.",
        f"Not measured: {counts['not measured']}. Not built: {counts['not built']}.",
        f"Probe failed: {counts['probe failed']}.",
        "",
        "| family | verdict | details |",
        "|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in sorted(rows, key=lambda cells: (cells[1], cells[0]))),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
