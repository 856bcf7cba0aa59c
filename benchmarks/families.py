"""`probe` on a tiny random model of each decoder family of transformers: ``python -m benchmarks.families [FAMILY …]``.

The rows of results/probe/families.md are written, by default those of all families. A family is left out if it is an
encoder, or a model of images or sound. It is listed as not built if no tiny configuration of it was found here, or if
its model takes no plain tokens.
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
    *("data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus", "plbart"),
    *("prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr"),
    *("whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
}
"""Families of encoders, and of decoders that read the output of an encoder."""
MODALITIES = {"text_config", "vision_config", "audio_config", "audio_encoder_config", "audio_encoder", "encoder_config"}
"""Parts of the configuration of a model of images or sound. Its text model, if it has one, is a family with a row."""
LARGEST = 10_000_000  # parameters of the largest model that is built
SECONDS = 120  # longest processor time for a family
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
    **{"is_decoder": True, "sliding_window": 8, "attention_window_size": 8, "attn_layer_indices": [1, 3]},
    **{"mamba_dt_rank": 4, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "swa_head_dim": 16},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 8, "unpadded_vocab_size": 96},
}
LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
HYBRID = ["linear_attention", "hybrid"] * 2
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16}
LOOP = {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(LOCAL_GLOBAL, ROPE), "layer_types": LOCAL_GLOBAL},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "dots3_note_text": {"head_dim": 32, "index_head_dim": 16, "index_n_heads": 2, "per_layer_config": {}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "gemma3n_text": {"layer_types": LOCAL_GLOBAL, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": LOOP,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 32, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "mimo_v2_flash": {"head_dim": 48},  # of which a third, an even number, is rotated
    "qwen4_exp_text": {"ngram_vocab_size_base": 96, "indexer_budget": 16, "indexer_compress_ratio": 4} | INDEXER,
    "zamba": {"layers_block_type": HYBRID, "num_key_value_heads": 4, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": HYBRID, "n_mamba_heads": 8, "mamba_headdim": 16, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further sizes of single families."""
LIBRARY_FAULTS = {
    **dict.fromkeys(("afmoe", "gpt_oss", "granitemoehybrid", "opt"), "masks without position_ids (transformers#39997)"),
    **dict.fromkeys(
        ("bamba", "falcon_mamba", "jamba", "mamba", "nemotron_h", "zamba"), "cached Mamba layers (transformers#46741)"
    ),
    "zamba2": "decoding one token at a time, also in fp64 (no thread was found)",
    "cpmant": "cache (transformers#48013); its text is read in both directions by design (OpenBMB/CPM-Live#259)",
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
    config = kind(**sizes | OPTIONS.get(family, {}))
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
    if family in ENCODERS:
        return "left out", "an encoder, or a decoder that reads the output of an encoder"
    if parts := MODALITIES & set(CONFIG_MAPPING[family].sub_configs):
        return "left out", f"a model of several parts: {', '.join(sorted(parts))}"
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return measured_row(family)
    except TooSlow:
        return "not measured", f"longer than {SECONDS} s of processor time"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def measured_row(family: str) -> tuple[str, str]:
    """Return the verdict and the details of `probe` about a family."""
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


class TooSlow(BaseException):
    """Raised after `SECONDS`. It is no `Exception`, because `probe` reports those of a model and continues."""


def stop(*_: Any) -> None:
    raise TooSlow


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGPROF, stop)
    families = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() and sys.argv[1:] else []
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    rows = {family: tuple(found) for family, *found in cells}
    for family in families:
        rows[family] = row(family)
        print(family, *rows[family], sep=" | ", flush=True)
    write_page([(family, *found) for family, found in rows.items()])


def write_page(rows: list[tuple[str, ...]]) -> None:
    counts = Counter(found for _, found, _ in rows)
    lines = [
        "# `probe` on the decoder families of transformers",
        "",
        f"Tiny random models, transformers {transformers.__version__}, `python -m benchmarks.families`.",
        f"Sound: {counts['sound']}. Accused: {counts['accused']}. Not judged: {counts['not judged']}.",
        f"Not measured: {counts['not measured']}. Not built: {counts['not built']}.",
        f"Probe failed: {counts['probe failed']}. Left out: {counts['left out']}.",
        "",
        "| family | verdict | details |",
        "|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in sorted(rows, key=lambda cells: (cells[1], cells[0]))),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
